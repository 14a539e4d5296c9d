"""A discrete-event simulation of a setting: what the planner's averages leave out.

Arrivals, queues, the line shared by transfers, decode slots and batches, prefix caches, failures and conversions; where
a request goes is decided by `prfaas.routing`, the code that the router runs. The same seed gives the same run to the
last bit. Pure: requests and progress come in as parameters, and time is the simulation's own.

The event loop is our own (`loop.py`): a heap of times and functions, thirty lines. simpy would make every request a
generator that waits for resources; but who starts next is decided here by a queue that looks at all who wait, and a
transfer or a batch ends at a time that moves whenever one joins or leaves, which in simpy is an interrupt of everybody.
It is not for speed: docs/simulator.md has both figures.
"""
