"""Pure functions on pytrees: mesh, layout, placement, collectives, and the edges to Flax."""
