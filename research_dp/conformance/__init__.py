"""What every exact strategy must do: the project's own tests use it, and `research_dp.conform`."""
