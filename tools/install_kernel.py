"""Register the Jupyter kernel "grpo-course" inside the environment that runs this program."""

import sys

from grpo_lib.common import environment

environment.prepare()  # before IPython is imported, which makes a folder for its history

from ipykernel.kernelspec import install  # noqa: E402

# JAX_PLATFORMS is not among the variables: on a TPU VM the same kernel must find the TPU.
print(
    install(
        prefix=sys.prefix,
        kernel_name=environment.KERNEL_NAME,
        display_name="GRPO course",
        env=environment.default_variables(),
    )
)
