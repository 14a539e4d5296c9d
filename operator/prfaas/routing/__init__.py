"""The pure routing decision, run by the router and by the simulator."""
