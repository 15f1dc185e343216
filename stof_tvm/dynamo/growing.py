"""Attributes of modules that a call puts new rows to, such as `self.keys = torch.cat([self.keys, new], 2)`."""

import operator

import torch

JOINS = (torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack)
VIEWS = (operator.getitem, torch.transpose, torch.permute, torch.reshape, torch.unflatten, torch.flatten)
METHODS = ("transpose", "permute", "view", "reshape", "contiguous", "to", "flatten", "unflatten", "movedim", "clone")


def grows(placeholder: torch.fx.Node) -> bool:
    """Whether the graph puts rows of others to an input, through views, and returns what this gives."""
    pending, seen = [(placeholder, False)], set()
    while pending:
        node, is_joined = pending.pop()
        if (node, is_joined) in seen:
            continue
        seen.add((node, is_joined))
        for user in node.users:
            if user.op == "output" and is_joined:
                return True
            is_join = user.op == "call_function" and user.target in JOINS
            is_view = user.op == "call_function" and user.target in VIEWS
            if is_join or is_view or (user.op == "call_method" and user.target in METHODS):
                pending.append((user, is_joined or is_join))
    return False
