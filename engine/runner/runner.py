"""Executes plans: tables, inputs, decoder, sampler, in the order of a plan's side effects.

A launch only enqueues work. Nothing in it depends on the value of a token, which is written to the row of the token
table on the device and read from there by the next step; so step N + 1 may be launched before step N has come back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.cache.spec import LatentKV
from engine.cache.tensors import CacheTensors
from engine.core.plan import Draft, Pending, RowStart, RunnerInfo, StepPlan
from engine.models.decoder import Decoder
from engine.models.draft_heads import DraftHead
from engine.runner.batch import DeviceBatch, select_last
from engine.runner.budget_graphs import hold_all_tokens
from engine.runner.draft_head import HeadDrafter
from engine.runner.draft_model import DraftModel
from engine.runner.drafting import Verify, draw_places, first_draws, put_proposals
from engine.runner.graphs import Capture, StepGraphs, find_wave_aligned_tokens, longest_prompt, padding
from engine.runner.inputs import Inputs, StepShape, places
from engine.runner.mask_staging import MaskStaging
from engine.runner.pending import ComputedStep, DecodedStep, Download, MaskedStep, PendingStep, PromptLogprobs
from engine.runner.tables import RowTables
from engine.runner.warmup import WarmupStep, logprobs_bucket
from engine.sampling.logits import EDIT_IDS, EntryEdits, RowEdits, sent
from engine.sampling.sampler import PLAIN, Drawn, Sampler, SamplingExtras
from engine.types import SamplingParams
from kernels.compilation.watch import CompileWatch
from kernels.hardware import multiprocessors
from kernels.select import Ops

# Draws the tokens of a computed step with its entries' sampling extras.
Draw = Callable[[SamplingExtras], Drawn]

# Rows of logits that prompt log-probabilities hold at once: [256, vocabulary] is 160 MB for 151,936 tokens.
PROMPT_CHUNK = 256


class DeviceRunner:
    """One device, one model, one pool. Every method must be called from one thread.

    capture makes graphs of steps; None runs every step eagerly. watch counts the kernels that are compiled late.
    trim_last_layer lets the last layer give each entry's last token alone. drafts: tokens that an entry
    of a plan may draft. drafter: draws them, a small model or a head; its caches are behind the decoder's.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: CacheTensors,
        info: RunnerInfo,
        ops: Ops,
        max_rows: int,
        token_budget: int,
        device: torch.device,
        capture: Capture | None = None,
        watch: CompileWatch | None = None,
        trim_last_layer: bool = True,
        drafts: int = 0,
        drafter: Decoder | DraftHead | None = None,
        budget_graphs: bool = False,
    ) -> None:
        self._watch = watch
        self._trims = trim_last_layer
        self._drafts, self._most_drafts = drafts > 0, drafts
        self._decoder = decoder
        self._caches = caches
        self._info = info
        self._ops = ops
        self._device = device
        self._sampler = Sampler(ops, decoder.vocabulary)
        self._tables = RowTables(max_rows, info.max_model_len, info.pool, device)
        self._budget_graphs = budget_graphs
        max_tokens = max(token_budget, max_rows) + (padding(max_rows) if budget_graphs else 0)
        self._inputs = Inputs(self._tables, info.pool, max_rows, max_tokens, device, ops, drafts > 0)
        self._draft_model: DraftModel | None = None
        self._draft_head: HeadDrafter | None = None
        own = (caches.layers[len(decoder.layers) :], ops, self._inputs, self._tables)
        if isinstance(drafter, DraftHead):
            self._draft_head = HeadDrafter(drafter, decoder.embed, *own)
        elif drafter is not None:
            self._draft_model = DraftModel(drafter, *own)
        self._masks = MaskStaging(device)
        self._params: list[SamplingParams] = [SamplingParams()] * (max_rows + 1)
        self._num_prompt = [0] * (max_rows + 1)
        self._edits: dict[int, RowEdits] = {}
        # For the most that a request may ask for: none takes more of the device than there was at the start.
        self._edit_ids = torch.zeros((max_rows, EDIT_IDS), dtype=torch.int64, device=device)
        self._rows_with_extras: set[int] = set()  # rows whose drawing takes more than their parameters on the device
        self._rows_with_prompt_logprobs: set[int] = set()  # rows that asked for log-probabilities of their prompt
        self._rows_of_whole_logits: set[int] = set()  # rows that candidates of ranks do not say enough for
        # How many tokens the entries of a step with drafts gave, and where the last kept one stands, for what is done
        # behind the draw.
        self._given = torch.zeros(2, self._inputs.max_entries if drafts else 0, dtype=torch.int32, device=device)
        self._limits = (max_rows, token_budget, info.max_model_len)
        self._graphs: StepGraphs | None = None
        if capture is not None:
            self.use_graphs(capture)

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @property
    def info(self) -> RunnerInfo:
        """What the runner was made with, and the shapes that its graphs pad mixed steps to."""
        return self._info if self._graphs is None else replace(self._info, mixed=self._graphs.mixed_shapes)

    @property
    def num_late_compiles(self) -> int:
        """Kernels that were compiled, or loaded from disk, after the runner was ready."""
        return 0 if self._watch is None else self._watch.count

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue a step. The plan's entries must fit the engine's max_rows and token_budget."""
        for start in plan.starts:
            self._start(start)
        keep_all = not self._rows_with_prompt_logprobs.isdisjoint(plan.rows) and any(
            map(self._owes_prompt_logprobs, plan.rows, plan.first)
        )
        whole_logits = not self._rows_of_whole_logits.isdisjoint(plan.rows) and any(
            sampled and row in self._rows_of_whole_logits for row, sampled in zip(plan.rows, plan.samples, strict=True)
        )
        padded = self._graphs.fit(plan, whole_logits) if self._graphs is not None else None
        if padded is not None and padded.entries != padded.num_single and keep_all:
            padded = None
        entries = at = None if padded is None else places(plan, padded)
        at_draws = None
        if plan.drafts and padded is not None and at is not None:
            at = first_draws(padded, plan, at)
        elif plan.drafts:
            at, found = draw_places(plan)
            at_draws = sent(found, self._device)
        extras, wanted = self._sampling_extras(plan, at)
        shape = self._inputs.stage(plan, padded)
        if whole_logits and not shape.whole_logits:
            shape = replace(shape, whole_logits=True)
        if plan.state_copies:
            self._caches.copy_states(plan.state_copies)
        if self._graphs is not None and padded is not None:
            x, draw = self._replay(self._graphs, padded, plan.follows)
        else:
            x, draw = self._eager(shape, keep_all, at_draws, plan.follows)
        parts, prompts = self._prompt_logprobs(plan, x) if keep_all else ([], [])

        def drawn(extras: SamplingExtras) -> PendingStep:
            found = draw(extras)
            given = () if found.given is None else (found.given,)
            download = Download([found.tokens, *given, *(found.logprobs or ()), *parts], self._ops)
            gave = None if found.given is None else entries or range(len(plan.rows))
            return PendingStep(plan.step, plan.samples, download, wanted, prompts, at, gave)

        if plan.masked:
            return MaskedStep(self._masks.rows, partial(self._draw_masked, plan, at, extras, drawn))
        return drawn(extras)

    @torch.inference_mode()
    def _draw_masked(
        self,
        plan: StepPlan,
        at: Sequence[int] | None,
        extras: SamplingExtras,
        drawn: Callable[[SamplingExtras], PendingStep],
    ) -> PendingStep:
        """Draw a launched step, now that it is known what its masked entries may draw. at: entries' places."""
        drafts = plan.drafts
        held = list(plan.masked) if at is None else [at[entry] for entry in plan.masked]
        if drafts:
            counts = [1 + drafts[entry].count if entry in drafts else 1 for entry in plan.masked]
            held = [place + i for place, count in zip(held, counts, strict=True) for i in range(count)]
        return drawn(replace(extras, masks=self._masks.send(held)))

    def compute(self, shape: StepShape, only: Sequence[int] | None = None) -> ComputedStep:
        """The staged step from token ids to logits, and what draws plainly from them: both on the device alone. `only`:
        the layers to run."""
        decoded = self._decode(shape, only)
        logits = self._decoder.logits(decoded.drawing)
        return ComputedStep(decoded, logits, partial(self._draw, decoded, logits, shape, PLAIN))

    def _decode(
        self,
        shape: StepShape,
        only: Sequence[int] | None = None,
        keep_all: bool = False,
        draw_places: torch.Tensor | None = None,
    ) -> DecodedStep:
        """The staged step up to its residual stream: all of it (`keep_all`), or of the tokens that draw. In a step with
        drafts these are at `draw_places`, all when None."""
        model, head = self._draft_model, self._draft_head
        if self._drafts:
            self._inputs.begin_at_true_ends(shape)
        if shape.drafts and head is not None:
            head.propose(shape)
        elif shape.drafts and model is not None:
            model.propose(shape, only is not None)
        elif shape.drafts:
            put_proposals(self._inputs, shape, self._tables, self._ops)
        batch = self._inputs.batch(shape)
        taps = () if head is None else head.taps
        last_tokens = None if shape.drafts else self._inputs.last_tokens(shape)
        trimmed = self._trims and not keep_all and not shape.drafts and len(self._decoder.layers) not in taps
        x, seen = self._decoder.tapped(batch, self._caches.layers, taps, only, last_tokens if trimmed else None)
        verify = advance_states = follow = None
        if shape.drafts:
            verify = Verify.of(self._inputs, shape, batch.token_ids, draw_places)
            advance_states = None if batch.deferred is None else partial(self._advance_states, batch, verify)
        if model is not None:
            follow = partial(model.follow, batch, last_tokens if self._trims else None, only is not None)
        elif head is not None:
            last_kept = None if verify is None else self._given[1, : len(verify.count)]
            follow = partial(head.follow, batch, seen, shape, verify, last_kept, self._trims)
        if verify is not None:
            return DecodedStep(x, verify.select_drawing(x), verify, advance_states, follow)
        drawing = x if trimmed else select_last(x, last_tokens)
        return DecodedStep(x if keep_all else drawing, drawing, follow=follow)

    def _advance_states(self, batch: DeviceBatch, verify: Verify) -> None:
        """Bring running states up to the tokens that stand: drafts may be drawn twice, and states not."""
        num_kept = self._given[1, : len(verify.count)] + 1 - batch.query_start[:-1]
        for advance in batch.deferred or ():
            advance(num_kept)

    def _eager(
        self, shape: StepShape, keep_all: bool, draw_places: torch.Tensor | None, follows: bool
    ) -> tuple[torch.Tensor, Draw]:
        """Compute the staged step, kernel by kernel: the residual stream, and what draws its tokens."""
        decoded = self._decode(shape, None, keep_all, draw_places)
        logits = self._decoder.logits(decoded.drawing)

        def draw(extras: SamplingExtras) -> Drawn:
            drawn = self._draw(decoded, logits, shape, extras)
            decoded.finish(follows)
            return drawn

        return decoded.x, draw

    def _replay(self, graphs: StepGraphs, shape: StepShape, follows: bool) -> tuple[torch.Tensor, Draw]:
        """The same by a graph, which draws plainly: entries that ask for more are drawn once more, from its logits."""
        computed = graphs.run(shape)
        decoded, logits = computed.decoded, computed.logits

        def draw(extras: SamplingExtras) -> Drawn:
            if not extras.plain:
                if decoded.verify is not None:
                    decoded.verify.put_back(self._tables)
                drawn = self._draw(decoded, logits, shape, extras)
            else:
                drawn = computed.draw()
                if extras.num_logprobs is not None:
                    whole = self._decoder.vocabulary.whole(logits)
                    drawn = self._sampler.with_logprobs(whole, drawn, extras.num_logprobs)
            decoded.finish(follows)
            return drawn

        return decoded.drawing, draw

    def use_graphs(self, capture: Capture) -> None:
        """Pad steps from now on, and replay what `capture` makes of them."""
        pool = self._info.pool
        bounded = pool.is_fp8 or any(isinstance(group.spec, LatentKV) for group in pool.groups)
        wave_aligned_tokens = find_wave_aligned_tokens(self._decoder.widest_product, multiprocessors(self._device))
        longest = longest_prompt(self._decoder.ranks, pool.ranks > 1)
        long_chunks = hold_all_tokens(group.spec for group in pool.groups)
        self._graphs = StepGraphs(
            self.compute,
            capture,
            *self._limits,
            bounded,
            wave_aligned_tokens,
            self._most_drafts,
            longest,
            self._budget_graphs,
            long_chunks,
        )

    @property
    def graphs(self) -> StepGraphs | None:
        """Graphs of steps, when they are on."""
        return self._graphs

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        """Whether such a step needs no graph to be made first, as `engine.core.plan.Runner` has it."""
        return self._graphs is None or self._graphs.drafts_ready(singles, entries, depth)

    def idle(self) -> bool:
        """Make one more graph ahead of its use. False when there is none left."""
        shape = None if self._graphs is None else self._graphs.next_shape
        if shape is None:
            return False
        self.make_graph(shape)
        return True

    @torch.inference_mode()
    def run_warmup_step(self, step: WarmupStep) -> None:
        """Run a step of dummy entries eagerly, through one layer of each kind."""
        dummy, entries = self._tables.dummy, step.singles + step.longer
        counts = [1] * step.singles + [step.count] * step.longer
        drafts = {entry: Draft(step.count - 1, 0, ()) for entry in range(step.singles, entries)} if step.drafts else {}
        plan = StepPlan(0, [dummy] * entries, [step.first] * entries, counts, [False] * entries, drafts=drafts)
        # Where kernels are compiled and not run, nothing is staged and no length is written. torch's operations run all
        # the same, and what they would take for indices must not be left from a step of another shape.
        self._inputs.clear()
        self._tables.lengths.zero_()
        padded = None
        if step.padded:
            padded = StepShape.drafted(step.singles, step.longer, step.count - 1, self._info.max_model_len)
        shape = replace(self._inputs.stage(plan, padded), whole_logits=step.whole_logits)
        extras = step.extras
        if step.masked:
            self._masks.rows(entries, -(-self._info.vocab_size // 32)).fill(-1)
            extras = replace(extras, masks=self._masks.send(range(entries)))
        computed = self.compute(shape, self._decoder.warmup_layers)
        self._draw(computed.decoded, computed.logits, shape, extras)
        computed.decoded.finish()

    @torch.inference_mode()
    def make_graph(self, shape: StepShape) -> None:
        """Make the graph of a shape, by a step of dummy entries."""
        assert self._graphs is not None
        dummy, count = self._tables.dummy, 1 if shape.num_single else shape.max_query
        drafts = {0: Draft(shape.drafts, 0, ())} if shape.drafts and not shape.num_single else {}
        self._inputs.stage(StepPlan(0, [dummy], [0], [count], [False], drafts=drafts), shape)
        self._graphs.run(shape)

    def close(self) -> None:
        """Free the device memory. The runner cannot be used afterwards."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        held = ("_decoder", "_caches", "_tables", "_inputs", "_masks", "_edits", "_edit_ids", "_graphs", "_given")
        for name in (*held, "_draft_model", "_draft_head"):
            delattr(self, name)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self._params[row] = params
        self._num_prompt[row] = start.num_prompt
        self._edits.pop(row, None)
        self._rows_with_extras.discard(row)
        self._rows_with_prompt_logprobs.discard(row)
        self._rows_of_whole_logits.discard(row)
        if self._sampler.needs_whole_logits(params):
            self._rows_of_whole_logits.add(row)
        if not params.plain:
            edits = RowEdits(start, self._edit_ids[row], self._decoder.vocabulary)
            if edits.touch(start.num_prompt):
                self._edits[row] = edits
        if not params.plain or params.logprobs is not None:
            self._rows_with_extras.add(row)
        if params.prompt_logprobs is not None:
            self._rows_with_prompt_logprobs.add(row)

    def _draw(self, decoded: DecodedStep, logits: torch.Tensor, shape: StepShape, extras: SamplingExtras) -> Drawn:
        """Tokens behind those that draw, from their logits [E, C], which go into the token table."""
        tables, verify = self._tables, decoded.verify
        entries = self._inputs.entries(shape) if verify is None else verify.draws
        held = (tables.params, entries.rows, entries.lengths, tables.tokens)
        drawn = self._sampler.draw(logits, *held, extras, shape.whole_logits)
        tokens = self._ops.keep_tokens(drawn.tokens, tables.tokens, entries.out_rows, entries.lengths)
        drawn = replace(drawn, tokens=tokens)
        if verify is not None:
            told = verify.accept(drawn, tables, self._ops)
            self._given[:, : told.shape[1]] = told
            drawn = replace(drawn, given=told[0])
        elif self._drafts:
            tables.lengths[entries.out_rows] = entries.lengths + 1
        return drawn

    def _sampling_extras(self, plan: StepPlan, at: Sequence[int] | None) -> tuple[SamplingExtras, dict[int, int]]:
        """What the sampling entries ask for, and how many log-probabilities each. at: entries' places in a padded
        step."""
        if self._rows_with_extras.isdisjoint(plan.rows):
            return PLAIN, {}
        edits, wanted, penalties = [], {}, False
        for entry, (row, sampled) in enumerate(zip(plan.rows, plan.samples, strict=True)):
            if not sampled or row not in self._rows_with_extras:
                continue
            params = self._params[row]
            if params.logprobs is not None:
                wanted[entry] = min(params.logprobs, self._info.vocab_size)
            drafts = plan.drafts[entry].count if entry in plan.drafts else 0
            # A row may hold less than planned, by as many drafts as a step in front of this one has.
            of, least = self._edits.get(row), plan.first[entry] + plan.count[entry] - drafts - self._most_drafts
            if of is not None and of.touch(least):
                draw, tokens = entry if at is None else at[entry], self._tables.tokens[row]
                edits += [EntryEdits(draw + i, least + i, of, tokens) for i in range(1 + drafts)]
            penalties |= (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        most = min(logprobs_bucket(max(wanted.values())), self._info.vocab_size) if wanted else None
        return SamplingExtras(edits, penalties, most), wanted

    def _owes_prompt_logprobs(self, row: int, first: int) -> bool:
        """Whether an entry that begins at `first` computes tokens in front of some whose log-probabilities it owes."""
        return row in self._rows_with_prompt_logprobs and first + 1 < self._num_prompt[row]

    def _prompt_logprobs(self, plan: StepPlan, x: torch.Tensor) -> tuple[list[torch.Tensor], list[PromptLogprobs]]:
        """Log-probabilities of the prompt tokens that follow the computed ones, for the entries that asked for them."""
        asked, places, targets = [], [], []
        start, total = 0, 0
        for entry, (row, first, count) in enumerate(zip(plan.rows, plan.first, plan.count, strict=True)):
            k = self._params[row].prompt_logprobs
            if k is not None and self._owes_prompt_logprobs(row, first):
                owed = min(count, self._num_prompt[row] - 1 - first)
                asked.append(PromptLogprobs(entry, total, total + owed, min(k, self._info.vocab_size)))
                places.append(x[start : start + owed])
                targets.append(self._tables.tokens[row, first + 1 : first + 1 + owed])
                total += owed
            start += count
        most = min(logprobs_bucket(max(a.count for a in asked)), self._info.vocab_size)
        chunks = [
            self._ops.logprobs(self._decoder.whole_logits(rows), tokens.long(), most)
            for rows, tokens in zip(
                torch.cat(places).split(PROMPT_CHUNK), torch.cat(targets).split(PROMPT_CHUNK), strict=True
            )
        ]
        return [torch.cat(parts) for parts in zip(*chunks, strict=True)], asked
