"""Integrations with training frameworks, each in a module or a folder of its own.

ckpt imports a framework only in the modules of its integration, and depends on no framework. What
several integrations use is in ``shared``.
"""
