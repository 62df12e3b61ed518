"""Keep the files of a step as they are while increments refer to them.

An *increment* is a data file that leaves out the chunks that the file of an older step, its *base*,
also has. The *heirs* of a step are the steps on its tier whose increments refer to its files. If a
step in another root refers to them, a pin with the end ``BASE_END`` keeps the base from being
removed.
"""

from __future__ import annotations

from ckpt.catalog.inventory import Inventory, heirs_of
from ckpt.catalog.verify import StepFolder
from ckpt.errors import ObjectExists
from ckpt.root.pins import BASE_END, note_of


def require_no_heirs(folder: StepFolder) -> None:
    """Raise ``ObjectExists`` if increments of other steps refer to the files of the step, so that
    these must not be written in another encoding.
    """
    steps = Inventory(folder.backend).look()
    pins = (pin for step in steps if step.ref == folder.ref for pin in step.pins)
    if base_pin := next((pin for pin in pins if pin.until == BASE_END), None):
        raise ObjectExists(
            folder.ref.manifest,
            f"{note_of(folder.backend, base_pin).reason}, and its files would get another "
            "encoding: copy the steps of that run to another place first, and remove them",
        )
    if heirs := heirs_of(steps).get(folder.ref):
        numbers = ", ".join(str(ref.step) for ref in sorted(heirs))
        raise ObjectExists(
            folder.ref.manifest,
            f"steps {numbers} on {folder.backend.url} refer to its files, which would get another "
            "encoding: copy these steps to another place first, and remove them here",
        )
