"""Integrations with training frameworks, each with a main module of its own.

ckpt imports a framework only in the modules of its integration, and depends on no framework.
"""
