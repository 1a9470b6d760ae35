"""How experience is kept: strata, writing, reading, inspecting."""
