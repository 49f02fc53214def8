"""A training loop without gin: a Linen module, arrays, and the strategy `fsdp`."""

import flax.linen as nn
import jax
import optax
from sklearn.datasets import load_digits

import research_dp

jax.config.update("jax_num_cpu_devices", 8)  # only where there is no accelerator


class Net(nn.Module):
    """A perceptron with dropout."""

    @nn.compact
    def __call__(self, x, train):
        """Images (B, 64) -> logits (B, 10)."""
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


x, y = load_digits(return_X_y=True)
data = research_dp.from_arrays(x / 16, y)
model = research_dp.from_linen(
    Net(),
    loss=optax.softmax_cross_entropy_with_integer_labels,
    metrics={"accuracy": lambda logits, y: logits.argmax(-1) == y},
)
spec = research_dp.TrainSpec(
    model=model, optimizer=optax.adamw(1e-3), example=data.example, batch_size=128
)
fsdp = research_dp.strategy("fsdp", min_weight_size=1024).build(spec)

state = fsdp.init(0)
for step, batch in enumerate(research_dp.train_batches(fsdp, data, num_steps=200), 1):
    state, metrics = fsdp.train_step(state, batch)
    if step % 50 == 0:
        means = research_dp.metric_means(metrics)
        print(f"step {step}  loss {means['loss']:.3f}  accuracy {means['accuracy']:.3f}")
print("test accuracy", round(research_dp.eval_metrics(fsdp, state, data)["accuracy"], 3))
