"""The methods to send gradients that launch/study.py compares, for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MEASUREMENTS = Path(__file__).resolve().parent.parent / "docs" / "measurements"
BASELINE = "uncompressed"


@dataclass(frozen=True)
class Method:
    """A way to send gradients.

    Attributes
    ----------
    name : str
        Of its records.
    options : str
        Of launch/train_ddp.py.
    remark : str
        What is to be expected, and from where that is known.
    baseline : str
        The method without compression that it is held against.
    """

    name: str
    options: str
    remark: str = ""
    baseline: str = BASELINE


@dataclass(frozen=True)
class Study:
    """Trainings of one task.

    Attributes
    ----------
    options : str
        Of launch/train_ddp.py, for all methods.
    measure : str
        What is held against the baseline: ``"accuracy"`` or ``"loss"``.
    goal : float
        How much of it may be lost: of accuracy absolute, of the loss relative.
    records : pathlib.Path
        Folder of the records; page and plot lie beside it.
    methods : tuple of Method
        In the order of the table.
    notes : tuple of str
        What the page says besides.
    tokens : int
        Of an example; 0 where examples have none.
    first : tuple of str
        Names of the methods to be run before the others, the most important first.
    """

    options: str
    measure: str
    goal: float
    records: Path
    methods: tuple[Method, ...]
    notes: tuple[str, ...]
    tokens: int = 0
    first: tuple[str, ...] = ()


_SPARSE = "--algorithm sparse_ring"
_NONE = "--no-feedback"
_TOPK = "--codec topk --select exact"


def _factors(optimizer: str) -> tuple[Method, ...]:
    """ACP-SGD and what it is made of, for an optimizer's options."""
    options = f"{optimizer} --low-rank acpsgd --rank 4".strip()
    return (
        Method("acpsgd4", options),
        Method("acpsgd4-exact", f"{options} --exact-steps 50", "the first tenth of the steps exact"),
        Method("acpsgd4-no-feedback", f"{options} {_NONE}", "feedback is part of the method"),
        Method("acpsgd4-no-reuse", f"{options} --no-reuse", "random factors at every step"),
    )


_DIGITS = (
    Method(BASELINE, ""),
    Method("zfp8", "--codec zfp --rate 8"),
    Method("minmax8", "--codec minmax --bits 8"),
    Method("fp8", "--codec fp8"),
    Method("qsgd4", "--codec qsgd --bits 4 --norm max"),
    Method("qsgd4-no-feedback", f"--codec qsgd --bits 4 --norm max {_NONE}", "unbiased"),
    Method("qsgd4-l2-no-feedback", f"--codec qsgd --bits 4 --norm l2 {_NONE}", "unbiased, steps up to √512 as large"),
    Method("qsgd4-l2", "--codec qsgd --bits 4 --norm l2", "rounding loses more than there is: feedback would diverge"),
    Method("terngrad", f"--codec terngrad {_NONE}", "unbiased; feedback is refused"),
    Method("onebit", "--codec onebit"),
    Method("onebit-no-feedback", f"--codec onebit {_NONE}", "feedback is part of the method (Seide et al. 2014)"),
    Method("sign-scale", "--codec sign --scale mean", "EF-SignSGD"),
    Method("topk1", f"{_TOPK} --density 0.01 {_SPARSE}"),
    Method("topk1-no-feedback", f"{_TOPK} --density 0.01 {_SPARSE} {_NONE}", "99 % of each gradient are lost"),
    Method("topk1-ldte", f"--codec topk --select ldte --density 0.01 {_SPARSE}"),
    Method("topk01", f"{_TOPK} --density 0.001 {_SPARSE}", "DGC's density without the rest of it"),
    Method("topk01-no-feedback", f"{_TOPK} --density 0.001 {_SPARSE} {_NONE}", "99.9 % of each gradient are lost"),
    Method("dgc01", f"--dgc 0.001 --warmup 4 {_SPARSE}", "the paper's schedule"),
    Method("randomk1", f"--codec randomk --density 0.01 {_SPARSE}", "an element waits 100 steps in the mean"),
    Method(
        "strom-0.001", f"--codec strom --threshold 0.001 {_SPARSE}", "at most ±τ an element and step: losses queue up"
    ),
    Method("strom-0.1", f"--codec strom --threshold 0.1 {_SPARSE}", "few elements ever reach τ"),
    Method("variance", f"--codec variance --alpha 1.5 {_SPARSE}"),
    Method("variance-packed", f"--codec variance --alpha 1.5 --wire packed {_SPARSE}", "the paper's format"),
    Method("variance-micro", f"--codec variance --alpha 1.5 --micro-batches 4 {_SPARSE}", "from 4 micro-batches of 4"),
    Method("hybrid-0.01", f"--codec hybrid --threshold 0.01 --alpha 1.5 {_SPARSE}"),
    Method("hybrid-0.02", f"--codec hybrid --threshold 0.02 --alpha 1.5 {_SPARSE}"),
    Method("hybrid-0.03", f"--codec hybrid --threshold 0.03 --alpha 1.5 {_SPARSE}"),
    Method("hybrid-0.1", f"--codec hybrid --threshold 0.1 --alpha 1.5 {_SPARSE}"),
    Method("powersgd4", "--low-rank powersgd --rank 4"),
    *_factors(""),
)
_SGD = "--sgd 0.1 --momentum 0.5"
_MOMENTUM, _ADAMW = "uncompressed-momentum", "uncompressed-adamw"
_LOCAL = "--optimizer adamw --exact-steps 200 --diloco"
_GRADIENTS = "--gradient-codec qsgd:bits=4"
_TEXT = (
    Method(BASELINE, _SGD),
    Method("uncompressed-best", "--sgd 0.07 --momentum 0.7", "the best without compression: see below"),
    Method("qsgd4", f"{_SGD} --codec qsgd --bits 4 --norm max"),
    Method("onebit", f"{_SGD} --codec onebit"),
    Method(
        "onebit-no-feedback", f"{_SGD} --codec onebit {_NONE}", "feedback is part of the method (Seide et al. 2014)"
    ),
    Method("topk1", f"{_SGD} {_TOPK} --density 0.01 {_SPARSE}"),
    Method("topk1-no-feedback", f"{_SGD} {_TOPK} --density 0.01 {_SPARSE} {_NONE}", "99 % of each gradient are lost"),
    Method("dgc1", f"{_SGD} --dgc 0.01 --warmup 0.05 {_SPARSE}"),
    Method("dgc01", f"{_SGD} --dgc 0.001 --warmup 0.05 {_SPARSE}"),
    Method("variance", f"{_SGD} --codec variance --alpha 1.5 {_SPARSE}"),
    Method("hybrid-0.003", f"{_SGD} --codec hybrid --threshold 0.003 --alpha 1.5 {_SPARSE}"),
    Method("powersgd4", f"{_SGD} --low-rank powersgd --rank 4"),
    *_factors(_SGD),
    Method(_MOMENTUM, "--sgd 0.02", "at momentum 0.9: see below", _MOMENTUM),
    *(
        Method(f"{name}-momentum", f"--sgd 0.02 {options}", "", _MOMENTUM)
        for name, options in (
            ("onebit", "--codec onebit"),
            ("topk1", f"{_TOPK} --density 0.01 {_SPARSE}"),
            ("topk1-no-feedback", f"{_TOPK} --density 0.01 {_SPARSE} {_NONE}"),
            ("dgc01", f"--dgc 0.001 --warmup 0.05 {_SPARSE}"),
            ("variance", f"--codec variance --alpha 1.5 {_SPARSE}"),
            ("hybrid-0.003", f"--codec hybrid --threshold 0.003 --alpha 1.5 {_SPARSE}"),
        )
    ),
    Method(_ADAMW, "", "the task's own optimizer", _ADAMW),
    *(
        Method(f"{name}-adamw{suffix}", f"{options}{more}", "", _ADAMW)
        for name, options in (
            ("zfp8", "--codec zfp --rate 8"),
            ("zfp4", "--codec zfp --rate 4"),
            ("minmax8", "--codec minmax --bits 8"),
            ("minmax4", "--codec minmax --bits 4"),
            ("minmax4-block64", "--codec minmax --bits 4 --block 64"),
            ("minmax2", "--codec minmax --bits 2"),
            ("fp8", "--codec fp8"),
            ("int8", "--codec int8"),
            ("qsgd4", "--codec qsgd --bits 4 --norm max"),
            ("onebit", "--codec onebit"),
            ("topk1", f"{_TOPK} --density 0.01 {_SPARSE}"),
            ("topk01", f"{_TOPK} --density 0.001 {_SPARSE}"),
            ("variance", f"--codec variance --alpha 1.5 {_SPARSE}"),
            ("powersgd4", "--low-rank powersgd --rank 4"),
            ("powersgd32", "--low-rank powersgd --rank 32"),
            ("acpsgd4", "--low-rank acpsgd --rank 4"),
            ("acpsgd32", "--low-rank acpsgd --rank 32"),
        )
        for suffix, more in (("", ""), ("-no-feedback", f" {_NONE}"))
        if not (name == "variance" and more)  # which keeps what it has not sent, or is another method
    ),
    *(
        Method(f"{name}-adamw", options, remark, _ADAMW)
        for name, options, remark in (
            ("onebit-adam", "--optimizer onebit-adam", "momentum in one bit; a fifth of the steps exact"),
            ("onebit-adam-exact50", "--optimizer onebit-adam --exact-steps 50", "a tenth of the steps exact"),
            ("onebit-adam-topk1", f"--optimizer onebit-adam {_TOPK} --density 0.01", "momentum by top-k"),
            (
                "onebit-adam-qsgd4-gradients",
                f"--optimizer onebit-adam {_GRADIENTS}",
                "its first fifth of the steps by QSGD",
            ),
            ("zero-one-adam", "--optimizer zero-one-adam", "0/1 Adam"),
            ("zero-one-adam-qsgd4-gradients", f"--optimizer zero-one-adam {_GRADIENTS}", "its gradients by QSGD"),
            (
                "zero-one-adam-int8-gradients",
                "--optimizer zero-one-adam --gradient-codec int8",
                "its gradients in 8 bits",
            ),
            ("diloco50", f"{_LOCAL} 50 --outer-rate 1", "local steps, H = 50, after 200 exact ones"),
            ("diloco50-minmax4", f"{_LOCAL} 50 --outer-rate 1 --codec minmax --bits 4", ""),
            ("diloco50-streaming", f"{_LOCAL} 50 --outer-rate 1 --codec minmax --bits 4 --streaming 3 --delay 5", ""),
            ("sparse-loco50", f"{_LOCAL} 50 --outer-rate 2 --sparse-loco 0.03", "3 % of the outer gradients, rate 2"),
            ("diloco15", f"{_LOCAL} 15 --outer-rate 1", "H = 15: 20 averages"),
            ("sparse-loco15", f"{_LOCAL} 15 --sparse-loco 0.03", "the paper's rate, 1"),
        )
    ),
)
_IMPORTANT = (
    *("zfp8", "minmax4", "fp8", "qsgd4", "int8", "onebit-adam", "zero-one-adam"),
    *("onebit-adam-qsgd4-gradients", "zero-one-adam-qsgd4-gradients", "zero-one-adam-int8-gradients"),
    *("diloco50", "diloco50-minmax4", "sparse-loco50"),
)
"""What the goals for training with AdamW are about."""

_NOTES = (
    "* Majority vote (`sign` without a scale) is not here: its sums are ±1, and need a learning rate of their own.",
)
STUDIES: Mapping[str, Study] = {
    "digits": Study(
        "--epochs 24",
        "accuracy",
        0.01,
        MEASUREMENTS / "study",
        _DIGITS,
        (
            *_NOTES,
            "* `topk1`, `topk01` and `onebit` lose little without feedback here: so small a task is learned from the",
            "  largest elements alone. The feedback is sound: the hook keeps exactly what each step lost",
            "  (`tests/torch/gradients/check_sparse_methods.py`), and on least squares the same methods miss the",
            "  optimum by more than ten times as much without it (`tests/codecs/test_quantizers.py`,",
            "  `tests/sparse/test_sparse_states.py`).",
            "* One of the 360 test images is 0.28 %: small differences, and the order of methods close together, tell",
            "  nothing.",
        ),
    ),
    "text": Study(
        "--task text --batch 2 --steps 500 --exclude norms biases",
        "loss",
        0.02,
        MEASUREMENTS / "study-text",
        _TEXT,
        (
            *_NOTES,
            "* SGD with momentum 0.5 at a rate of 0.1. Without compression more momentum is a little better",
            "  (`uncompressed-best`; seed 0: 2.380 by 0.7 at 0.07, 2.392 by 0.6 at 0.1, 2.413 by 0.5 at 0.1,",
            "  2.452 by 0.9 at 0.02, 2.820 by none at 0.2: the first command below with other rates). But",
            "  gradients that come late bring a momentum of their own (I. Mitliagkas et al., “Asynchrony begets",
            "  Momentum”, Allerton 2016), which adds to the optimizer's: by 0.9 at 0.02 (`-momentum`) the same",
            "  methods lose far more, and `topk1` more than without feedback. DGC corrects the momentum before it",
            "  selects (Lin et al. 2018, section 3.1).",
            "* 500 steps are a short run: what waits at the end is never sent.",
            "* Under AdamW with local steps the ranks stay together for the first 200 steps (DiLoCo's paper",
            "  starts from a model that has 27 % of all steps behind it), and 6 averages follow, or 20 at H = 15.",
            "* With so few averages much of what SparseLoCo keeps never arrives, and twice the paper's outer rate is",
            "  better (seed 0, H = 50: 2.3675 by 1, 2.3508 by 1.5, 2.3414 by 2; by 1 and β = 1 instead of 0.95",
            "  2.3696). With more averages it is not needed (`--diloco 30`, 10 averages, by 1: 2.3342, and DiLoCo's",
            "  2.3320).",
        ),
        tokens=128,
        first=(BASELINE, _ADAMW, *(f"{name}-adamw" for name in _IMPORTANT), "qsgd4-adamw-no-feedback"),
    ),
}
