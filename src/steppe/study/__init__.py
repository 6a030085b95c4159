"""Studies: run methods until claims about them are decided, with intervals valid at every look."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .advice.advising import Advice as Advice, advise as advise
    from .design import Claim as Claim, Design as Design, Method as Method
    from .report import study_report as study_report
    from .rounds import (
        Study as Study,
        extend_study as extend_study,
        load_study as load_study,
        plan_study as plan_study,
        run_study as run_study,
    )
    from .sequence import (
        Interval as Interval,
        e_value as e_value,
        half_width as half_width,
        interval as interval,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
