"""Pure functions on pytrees: mesh, sharding, placement, collectives."""
