"""Integrations with training frameworks, each with a main module of its own.

A framework is imported only with the module of its integration, and ckpt depends on none of them.
"""
