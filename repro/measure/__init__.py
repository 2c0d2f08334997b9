"""Measuring: device time, memory, machine facts, statistics of samples."""
