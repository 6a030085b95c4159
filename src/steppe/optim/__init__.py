"""Flatness-aware optimizers: FAD, SAM and GAM around any torch optimizer, and their peers."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .adahessian import AdaHessian as AdaHessian
    from .asam import ASAM as ASAM
    from .cflat import CFlat as CFlat
    from .disam import (
        DISAM as DISAM,
        DISAMFAD as DISAMFAD,
        DISAMGSAM as DISAMGSAM,
        DISAMSAGM as DISAMSAGM,
    )
    from .engine import FlatnessOptimizer as FlatnessOptimizer
    from .excursion import Phase as Phase
    from .fad import FAD as FAD
    from .friendly_sam import FriendlySAM as FriendlySAM
    from .gam import GAM as GAM
    from .gam_exact import GAMExact as GAMExact
    from .gam_release import GAMRelease as GAMRelease
    from .genie import GENIE as GENIE
    from .ggal import GGAL as GGAL
    from .gsam import GSAM as GSAM
    from .joined import Joined as Joined
    from .looksam import LookSAM as LookSAM
    from .msam import MSAM as MSAM
    from .notices import BatchNormWarning as BatchNormWarning, Bfloat16Warning as Bfloat16Warning
    from .pgn import PGN as PGN
    from .registry import (
        OptimizerSpec as OptimizerSpec,
        build_optimizer as build_optimizer,
        optimizer_names as optimizer_names,
        optimizer_spec as optimizer_spec,
        register_optimizer as register_optimizer,
        search_space as search_space,
    )
    from .rwp import RWP as RWP
    from .sagm import SAGM as SAGM
    from .sam import SAM as SAM
    from .schedules import FollowLR as FollowLR, InverseSqrt as InverseSqrt
    from .vasso import VaSSO as VaSSO
    from .wsam import WSAM as WSAM
    from .yogi import Yogi as Yogi
else:  # hidden from type checkers: __getattr__ would make them accept any name
    __getattr__, __dir__, __all__ = attach(__name__)
