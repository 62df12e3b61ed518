"""Host memory and streams: slots, the image laid out in one, the snapshot that fills it, the
fence that guards it.
"""
