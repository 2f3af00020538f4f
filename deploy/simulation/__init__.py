"""Scale by simulation: service times are measured on a machine, a discrete-event model is fitted to them and checked.

`measurement` runs the real server; `model` is the simulation of gateways, slots and clients on a pool of cores; `fit`
chooses the model's costs from calibration runs; `check` compares it with runs that the fit has not seen; `scale`
multiplies machines up to a million writers.
"""
