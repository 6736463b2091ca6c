"""Estimates before the start: parameters, memory, step time and cost of a run.

estimate.py   TrainingPlan: all of it for one configuration and device
memory.py     peak memory by part, the largest micro-batch, the deepest model
speed.py      the MFU to expect: from a kept measurement, the hardware table, or a probe of the CPU
display.py    a plan as JSON and as text, and compared with what the run measured
"""
