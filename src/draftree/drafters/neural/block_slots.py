"""The input slots of a block in training: tokens and masks, and which slots each of them sees.

Shapes: g slots of a root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.formats.block_drafters import BlockDrafterConfig


@dataclass(frozen=True)
class SlotGroup:
    """The slots of a block in training: first the root's slot; the last slots predict the drafts.

    Attributes:
        offsets: [g] distance of each slot's position from the root's; 0 for the root.
        given: [g] whether a slot contains the text's token, and not a mask; true for the root.
        sees: [g, g] whether a slot may see another slot; layers may restrict this further.
    """

    offsets: Tensor
    given: Tensor
    sees: Tensor

    def to(self, device: torch.device) -> "SlotGroup":
        """Return the group with its tensors on another device."""
        return SlotGroup(self.offsets.to(device), self.given.to(device), self.sees.to(device))


def make_slot_group(layout: BlockDrafterConfig, conditioned: bool) -> SlotGroup:
    """Return the slots of a block in training.

    They are the root and masks or, if `conditioned`, tokens of the text from the root on, and a
    mask after each of them.
    """
    if not conditioned:
        at = torch.arange(layout.block)
        return SlotGroup(at, at == 0, torch.ones(len(at), len(at), dtype=torch.bool))
    at = torch.arange(layout.drafts)
    before, none = at[:, None] >= at, torch.zeros(len(at), len(at), dtype=torch.bool)
    sees = torch.cat(
        (
            torch.cat((before, none), dim=1),
            torch.cat((before, torch.eye(len(at), dtype=torch.bool)), dim=1),
        )
    )
    return SlotGroup(torch.cat((at, at + 1)), torch.arange(2 * len(at)) < len(at), sees)
