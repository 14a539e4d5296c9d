"""A discrete-event simulation of a setting: what the planner's averages leave out.

Arrivals, queues, the line shared by transfers, decode slots and batches, prefix caches, failures and conversions; where
a request goes is decided by `prfaas.routing`, the code that the router runs. The same seed gives the same run to the
last bit. Pure: requests and progress come in as parameters, and time is the simulation's own.

The event loop is our own (`loop.py`): a heap of times and functions. A library such as simpy would add a generator and
several objects to every request, and what is hard here, transfers and batches whose end moves whenever one joins or
leaves, it leaves to its user as interrupts. docs/model.md has the figures.
"""
