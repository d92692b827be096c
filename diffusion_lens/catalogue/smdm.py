"""SMDM's masked diffusion models and their autoregressive (AR) baselines: files of `nieshen/SMDM`.

A name without a suffix stands for the checkpoint of its size with the most training ("smdm-1028m" is
mdm-1028M-1600e18); names with a suffix stand for the others. Compiled from the files, cards and code of `nieshen/SMDM`
and ML-GSAI/SMDM.
"""

from typing import Any

from diffusion_lens.catalogue.entries import Evidence, PublishedFile

REPO = "nieshen/SMDM"
TOKENIZER_REPO = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"


def _entry(name: str, stem: str, evidence: Evidence, folder: str = "", **more: Any) -> PublishedFile:
    return PublishedFile(name, stem, evidence, REPO, folder or stem.split("-")[0], **more)


SMDM = (
    _entry("smdm-19m", "mdm-19M-10e18", "safetensors seen"),
    _entry("smdm-34m", "mdm-34M-6e18", "pth seen"),
    _entry("smdm-48m", "mdm-48M-10e18", "pth seen"),
    _entry("smdm-113m", "mdm-113M-30e18", "pth seen"),
    _entry("smdm-113m-10e18", "mdm-113M-10e18", "pth seen"),
    _entry(
        "smdm-170m",
        "mdm-170M-100e18",
        "safetensors seen",
        sha256="2d8c9b9a730715f2c772d5bc740e12951fc160e5e8511a16835f3537401ea9bb",
    ),
    _entry(
        "smdm-170m-rsl-0.01",
        "mdm-170M-100e18-rsl-0.01",
        "safetensors seen",
        sha256="0d09fe4ab201025ccf973111ab235f791b86c626e975c0dcb69e0a2a493c663e",
    ),
    _entry("smdm-231m", "mdm-231M-100e18", "name seen"),
    _entry("smdm-231m-10e18", "mdm-231M-10e18", "pth seen"),
    _entry(
        "smdm-336m",
        "mdm-336M-100e18",
        "safetensors seen",
        sha256="3cd6ec869fc29be1943d0ab2e74f47b59b28d40a2f22314021d60e8ccbb031b2",
    ),
    _entry(
        "smdm-336m-6e18",
        "mdm-336M-6e18",
        "safetensors seen",
        sha256="7b71fda282a31dddad4ccd769aaa3e50469a881c16be35c9a6be8fd53b020af7",
    ),
    _entry("smdm-336m-10e18", "mdm-336M-10e18", "pth seen"),
    _entry(
        "smdm-472m",
        "mdm-472M-100e18",
        "safetensors seen",
        sha256="aa672982e20eecb5fd850b3e22053846638cbc65b73a06e304da6588deb6799d",
    ),
    _entry("smdm-472m-10e18", "mdm-472M-10e18", "pth seen"),
    _entry("smdm-551m", "mdm-551M-60e18", "name seen"),
    _entry("smdm-629m", "mdm-629M-100e18", "name seen"),
    _entry("smdm-717m", "mdm-717M-60e18", "name seen"),
    _entry("smdm-831m", "mdm-831M-100e18", "name seen"),
    _entry("smdm-944m", "mdm-944M-60e18", "name seen"),
    _entry(
        "smdm-1028m",
        "mdm-1028M-1600e18",
        "safetensors seen",
        sha256="ce96ce67a051613b6d7feb419c99c0b4db5bfcfaaa0833ed7f7ecbc6632841d6",
    ),
    _entry("smdm-1028m-60e18", "mdm-1028M-60e18", "pth seen"),
    _entry(
        "smdm-1028m-100e18",
        "mdm-1028M-100e18",
        "safetensors seen",
        sha256="ed7d52165307e231c3d1882566512d93a6fbf35f8487aa9593a2c6e795964ec6",
    ),
    _entry("smdm-1028m-rsl-0.01", "mdm-1028M-3300e18-rsl-0.01-bs-1024", "safetensors seen"),
    _entry(
        "smdm-1028m-reverse",
        "mdm-1028M-1600e18-reverse",
        "safetensors seen",
        folder="reverse",
        trained_length=52,  # evaluate_reverse.py of ML-GSAI/SMDM
    ),
    _entry(
        "smdm-1028m-gsm8k",
        "mdm-1028M-3300e18-rsl-gsm8k",
        "safetensors seen",
        folder="gsm8k",
        sha256="1e968c26419d5b041adf3b1825e6d2b10887c45cdab76e60ea2d8341df31618f",
    ),
    _entry("smdm-1028m-sharegpt", "mdm-1028M-1600e18-sharegpt", "safetensors seen", folder="sharegpt"),
    _entry("smdm-1476m", "mdm-1476M-100e18", "pth seen"),
    _entry("ar-19m", "ar-19M-10e18", "safetensors seen"),
    _entry("ar-170m", "ar-170M-100e18", "name seen"),
    _entry("ar-170m-6e18", "ar-170M-6e18", "name seen"),
    _entry("ar-717m", "ar-717M-60e18", "pth seen"),
    _entry("ar-717m-30e18", "ar-717M-30e18", "pth seen"),
    _entry("ar-831m", "ar-831M-100e18", "pth seen"),
    _entry("ar-831m-30e18", "ar-831M-30e18", "pth seen"),
    _entry("ar-831m-60e18", "ar-831M-60e18", "pth seen"),
    _entry("ar-944m", "ar-944M-60e18", "pth seen"),
    _entry("ar-1028m", "ar-1028M-100e18", "pth seen"),
    _entry("ar-1028m-60e18", "ar-1028M-60e18", "pth seen"),
    _entry("ar-1028m-sharegpt", "ar-1028M-100e18-sharegpt", "name seen", folder="sharegpt"),
    _entry("ar-1233m", "ar-1233M-60e18", "pth seen"),
    _entry("ar-1476m", "ar-1476M-100e18", "pth seen"),
    _entry("ar-1476m-60e18", "ar-1476M-60e18", "pth seen"),
    _entry("ar-1678m", "ar-1678M-100e18", "pth seen"),
    _entry("ar-2121m", "ar-2121M-100e18", "safetensors seen"),
)
