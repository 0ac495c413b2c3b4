"""Asynchronous DiLoCo: like diloco_gpt.py, but communicates during the inner steps.

    pccl launch -n 4 examples/async_diloco_gpt.py

The model consists of two fragments, which are averaged in turn, one every 25 inner steps. So each is averaged once in
50 inner steps, and its update is applied 25 inner steps late (`--fragments 1`: the whole model, 50 late). The column
"waited s" is the time that peer 0 waited for the network (and, on one machine, for slower peers). Peers may be killed
or join at any time. Options and commands between hosts are those of diloco_gpt.py. As in Streaming DiLoCo, `--overlap 5
--mixing 0.5` applies each average after 5 inner steps, and mixes it with the local parameters.
"""

from common.run import prepare

from pccl import Communicator
from pccl.training import AsyncDiLoCo, OuterStep
from pccl.training.compression import Compressor

run = prepare("Trains a small GPT with asynchronous DiLoCo.", fragments=2)
options, model, trainer, progress = run.options, run.model, run.trainer, run.progress
inner, rest = divmod(options.inner, options.fragments)
if rest:
    raise SystemExit(f"--inner {options.inner} is not a multiple of --fragments {options.fragments}")
total = options.steps * options.fragments
compression = run.compression
if isinstance(compression, Compressor):
    raise SystemExit("--compression: asynchronous DiLoCo takes only 8bit, 4bit, 2bit and 1bit")

with Communicator() as communicator:
    diloco = AsyncDiLoCo(
        communicator,
        model,
        trainer.optimizer,
        outer=run.outer,
        quantization=run.quantization,
        compression=compression,
        fragments=options.fragments,
        inner_steps=inner,
        overlap=options.overlap,
        mixing=options.mixing,
        ahead=options.ahead,
    )

    def has_landed() -> bool:
        return diloco.revision == diloco.outer_steps

    def show(steps: list[OuterStep], loss: float, *, is_last: bool = False) -> None:
        # The model holds this peer's own parameters, but the common ones are validated.
        validation_loss = None
        if progress.is_shown:
            here = [parameter.detach().clone() for parameter in model.parameters()]
            diloco.show_outer()
            validation_loss = model.validation_loss(run.corpus)
            for parameter, value in zip(model.parameters(), here, strict=True):
                parameter.data.copy_(value)
        progress.add(
            diloco.outer_steps * inner,
            steps[-1].revision,
            steps[-1].world_size,
            loss,
            validation_loss,
            sum(step.tx_bytes for step in steps),
            sum(step.waited_s for step in steps),
            diloco.digest(),
            communicator.stats,
            run.test_loss(is_last),
        )

    run.resume(diloco)
    diloco.join(options.peers)  # waits for all, or joins a run in progress
    steps: list[OuterStep] = []
    losses: list[float] = []
    loss = 0.0
    while diloco.outer_steps < total or (options.overlap and not has_landed()):
        first = diloco.outer_steps * inner - (options.overlap if options.overlap and not has_landed() else 0)
        losses += [trainer.step(first + i) for i in range(diloco.inner_steps)]
        steps.append(diloco.outer_step())
        run.save(diloco)
        if diloco.outer_steps % options.fragments == 0 and (has_landed() or not options.overlap):
            loss = sum(losses) / len(losses)
            show(steps, loss)
            steps, losses = [], []
    show([diloco.finish()], loss, is_last=True)
    run.save(diloco)

progress.finish(diloco.digest())
