"""The long-timescale loop: observe, estimate, plan, guard, act."""
