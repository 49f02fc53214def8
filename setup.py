"""Package metadata. constraints.txt pins the tested versions; README uses it."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

_PACKAGE = Path(__file__).with_name("research_dp")
VERSION = re.findall(r'^__version__ = "(.+)"', (_PACKAGE / "__init__.py").read_text(), re.M)[0]

# Each dependency with its tested range and its purpose.
INSTALL_REQUIRES = [
    "jax>=0.10.2,<0.12",  # the arrays, the meshes, the compiler
    "flax>=0.12.8,<0.13",  # models: Linen and NNX
    "optax>=0.2.8,<0.3",  # optimizers and schedules
    "gin-config>=0.5.0,<0.6",  # the configuration
    "numpy>=2.0,<3",  # host arrays
    "tensorflow-datasets>=4.9.10,<5",  # data sets
    "array_record>=0.8.3,<1",  # TFDS's random-access file format
    "importlib_resources>=6.0,<8",  # TFDS imports it for builders in packages, undeclared
    "tensorboard>=2.20,<3",  # its event files
    "clu>=0.0.12,<0.1",  # metrics
    "grain>=0.2.18,<0.3",  # threads and processes that prefetch batches
    "orbax-checkpoint>=0.12.8,<0.13",  # checkpoints
    "docstring_parser>=0.16,<1",  # descriptions of parameters in `--list --json`, docs/gin.md
    "shtab>=1.13,<2",  # completion in bash of commands, flags and gin files
    "lazy_loader>=0.4,<1",  # public names are imported when they are used
    "safetensors>=0.5,<1",  # parameters as other frameworks write and read them
    "absl-py>=2,<3",  # Grain's worker processes require parsed flags
    "filelock>=4.2.11,<5",  # one run a folder; one process prepares a data set while others wait
    "rich>=13,<16",  # the progress bar and tables on a terminal
    "jinja2>=3.1,<4",  # pages, and tables in a notebook; Altair, which draws charts, brings it too
    "pillow>=10,<14",  # decoding and resizing images
    "scikit-learn>=1.5,<2",  # ships the handwritten digits
]

# These take 1.1 GB and half a minute on a fast network; with TensorFlow 2.5 GB. TFDS needs it to
# prepare data sets that give images as arrays (mnist, cifar10), and to read TFRecord (tf_data).
TENSORFLOW = [
    "tensorflow-cpu>=2.20,<3; platform_machine == 'x86_64' and sys_platform == 'linux'",
    "tensorflow>=2.20,<3; platform_machine != 'x86_64' or sys_platform != 'linux'",
]

TEXT = "tokenizers>=0.20,<1"  # `sample` of published models: their tokenizer.json
WANDB = "wandb>=0.31,<1"  # `train.writers = [@wandb]`: records, to Weights & Biases
MLFLOW = "mlflow-skinny>=3.17,<4"  # `[@mlflow]`: MLflow's client alone, to a server or a folder

DOCS = [
    "mkdocs-material>=9.7,<10",  # the site
    "mkdocstrings-python>=2,<3",  # its reference, from docstrings
]

EXTRAS = {
    "tf": TENSORFLOW,
    "cuda": ["jax[cuda13]"],  # NVIDIA GPUs
    "tpu": ["jax[tpu]"],  # Cloud TPUs
    # Compilers for absent devices (analysis/topologies.py); they need no driver.
    "plan-gpu": [
        "jax-cuda13-plugin>=0.10.2,<0.12",  # XLA's compiler for NVIDIA GPUs, as JAX finds it
        "jax-cuda13-pjrt>=0.10.2,<0.12",  # the compiler itself
        "nvidia-cuda-nvcc>=13,<14",  # ptxas and libdevice, which the compiler calls
        "nvidia-cudnn-cu13>=9.10,<10",  # needed to plan flash attention
    ],
    "plan-tpu": ["libtpu>=0.0.51,<0.1"],  # XLA's compiler for TPUs
    "plots": [  # the pages of `plan --html` and `compare --html`
        "altair>=6.3,<7",  # charts, as Vega-Lite
        "vl-convert-python>=1.9,<2",  # Vega's scripts, put in the page: it needs no network
    ],
    "text": [TEXT],
    "wandb": [WANDB],
    "mlflow": [MLFLOW],
    "docs": DOCS,
    "test": [
        "pytest>=8",  # the test suite
        "pytest-xdist>=3.6,<4",  # runs it in several processes: half the time on two cores
        "hypothesis>=6.100",  # property tests
        *("setuptools>=65", "wheel>=0.43"),  # build the wheel that a test installs
        "pyyaml>=6",  # manifests
        *("altair>=6.3,<7", "vl-convert-python>=1.9,<2"),  # pages
        "playwright>=1.50,<2",  # opens pages in an installed Chromium
        "matplotlib>=3.9,<4",  # pictures of README.md, the notebook
        TEXT,
        *(WANDB, MLFLOW),  # writers of records: what they keep offline is read back
        *TENSORFLOW,  # data sets in both formats
        *DOCS,  # a test builds the site
        *("nbclient>=0.10,<1", "ipykernel>=6,<8"),  # run the notebook
    ],
    "dev": ["ruff>=0.14", "mypy>=1.18", "pre-commit>=4"],  # linter and formatter, types, hooks
}


class BuildWithGinFiles(build_py):
    """Puts the folder gin/ inside the package, so that a wheel has the shipped files."""

    def run(self):
        """Copies the files to install."""
        super().run()
        if not self.editable_mode:
            to = Path(self.build_lib) / "research_dp" / "gin"
            shutil.copytree("gin", to, dirs_exist_ok=True)


setup(
    name="research_dp",
    version=VERSION,
    entry_points={"console_scripts": ["research-dp = research_dp.commands.main:main"]},
    description="Data-parallel training in JAX, the strategy chosen by a gin file.",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["research_dp", "research_dp.*"]),
    package_data={
        "research_dp": [
            *("py.typed", "__init__.pyi"),
            *("distributed/hardware.toml", "certification/costs.toml", "runs/published.toml"),
            "templates/*",
        ]
    },
    cmdclass={"build_py": BuildWithGinFiles},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
