"""The core: who is served next, what the device does now, where outputs go. Knows no model, no
page, no tensor.
"""
