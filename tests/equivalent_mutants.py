"""Mutants that compute the same: why no test can tell, and their files and lines as `ast.unparse` writes them."""

BECAUSE: dict[str, list[tuple[str, str]]] = {
    "A step's micro-batches all have the column, or none has.": [
        (
            "training/update.py",
            "if 'kl' not in observed.terms and any((column is not None for column in reference)):",
        ),
    ],
    "An `out=` of another shape is made to fit over the same memory.": [
        ("generation/decoding_rows.py", "torch.index_select(prefilled.logits, 0, at, out=logits[done:done - len(at)])"),
        ("generation/decoding_rows.py", "torch.index_select(prefilled.logits, 0, at, out=logits[done:done])"),
    ],
    "The checkpoint of that step itself is damaged.": [
        (
            "runs/checkpoint.py",
            "good = next((each for each in reversed(steps) if each <= step and (not damage(steps[each]))), None)",
        ),
    ],
    "A layer without an adapter has one of rank 0, whose scale is of nothing.": [
        (
            "models/shared_prompt/adapted.py",
            "… cast(nn.Linear | Conv1D, module), None, 1.0) for layer, module in zip(layers, mod …",
        ),
    ],
    "It decides what is remembered or kept ready, for memory and speed, and the numbers are the same.": [
        ("models/shared_prompt/adapted.py", "if not not torch.is_grad_enabled():"),
        ("models/shared_prompt/adapted.py", "if torch.is_grad_enabled():"),
        (
            "models/shared_prompt/adapted.py",
            "bases = [base if not is_4_bit(base.layer) else _packed(base) for base in self.parts.bases]",
        ),
    ],
    "A layer, or the same of two layers, has both or neither.": [
        ("models/shared_prompt/decoder.py", "if layer.norms.query is not None or layer.norms.key is not None:"),
        ("models/shared_prompt/linear.py", "if mine.bias is not None or new.bias is not None:"),
    ],
    "All parts are of one type, on one device.": [
        ("models/shared_prompt/linear.py", "if any((PackedWeight.serves(_tensor(part)) for part in parts)):"),
    ],
    "A layer draws no random number here.": [
        ("models/shared_prompt/decoder.py", "x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)"),
    ],
    "Only numbers are taken of the copy.": [
        ("models/classifiers/classifier_body.py", "return ScoredBody(body, head.weight.clone()[0].clone())"),
        (
            "training/actor_critic/critic_folder.py",
            "save_file({name: each.clone().cpu().contiguous() for name, each in untied(head).items()}, folder / HEAD_FILE)",
        ),
        ("models/shared_prompt/decoder_layer.py", "return None if tensor is None else tensor.clone().clone()"),
        (
            "models/shared_prompt/linear.py",
            "self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.clone().contiguous(), USUAL_ROWS)",
        ),
        ("models/shared_prompt/decoder_layer.py", "return Norm(self.weight.clone().clone(), _cloned(self.bias))"),
        ("models/shared_prompt/linear.py", "return tensor if frozen else tensor.clone().clone()"),
    ],
    "Both ways to sort give the same numbers; which is quicker hangs on the size.": [
        (
            "generation/sampling.py",
            "if weights.device.type == 'cpu' and (vocab <= SMALL_VOCAB and count == vocab):",
        ),
        (
            "generation/sampling.py",
            "if weights.device.type == 'cpu' and (vocab > SMALL_VOCAB or count == vocab):",
        ),
        (
            "generation/sampling.py",
            "if weights.device.type == 'cpu' and (vocab <= SMALL_VOCAB or count != vocab):",
        ),
        ("generation/sampling.py", "ordered = np.sort(weights.clone().numpy(), axis=1)"),
    ],
    "A root has a token at least, and a window as wide as what is there hides nothing.": [
        ("models/shared_prompt/packed.py", "… ngths, self.branch_root, strict=True)), 1) …"),
        (
            "models/shared_prompt/packed.py",
            "… None if window is None or bucket.width < window else causal_mask(bucket.width, w …",
        ),
        ("models/shared_prompt/packed.py", "if window is not None and window > self.layout.longest:"),
    ],
    "Joining one tensor gives that tensor, copied.": [
        ("models/shared_prompt/adapted.py", "grad_low = torch.cat(back, dim=1) if len(back) >= 1 else back[0]"),
        ("models/shared_prompt/adapted.py", "return torch.cat(out, dim=1) if len(out) >= 1 else out[0]"),
        (
            "models/shared_prompt/adapted.py",
            "return AdaptedWeight(parts, torch.cat(downs) if len(downs) >= 1 else downs[0], tuple(ups))",
        ),
    ],
    "A matrix of no rows or no columns has no numbers.": [
        ("models/shared_prompt/adapted.py", "none = torch.ones(0, inputs, dtype=dtype, device=device)"),
        ("models/shared_prompt/adapted.py", "… ups = [torch.ones(outputs, 0, dtype=dtype, device=device …"),
    ],
    "The backward pass gives these no gradient whatever they remember.": [
        ("models/shared_prompt/adapted.py", "return weight.clone().to(self.dtype)"),
        (
            "models/shared_prompt/adapted.py",
            "return None if self.layer.bias is None else self.layer.bias.clone().to(self.dtype)",
        ),
        (
            "models/shared_prompt/adapted.py",
            "return replace(self, down=self.down.clone().clone(), ups=tuple((up.detach().clone() for up in self.ups)))",
        ),
        (
            "models/shared_prompt/adapted.py",
            "return replace(self, down=self.down.detach().clone(), ups=tuple((up.clone().clone() for up in self.ups)))",
        ),
    ],
    "No step has a negative number.": [
        ("runs/files.py", "kept, before = (0, -2)"),
    ],
    "There is nothing in it.": [
        ("generation/decoding_rows.py", "… return Columns(count=torch.ones(0, dtype=torch.long, device=device), l …"),
        (
            "generation/decoding_rows.py",
            "… torch.long, device=device), limit=torch.ones(0, dtype=torch.long, device=device), u …",
        ),
        (
            "generation/decoding_rows.py",
            "… ch.long, device=device), uniforms=torch.ones(0, width, dtype=torch.float64, device= …",
        ),
        (
            "generation/decoding_rows.py",
            "… h.float64, device=device), tokens=torch.ones(0, width, dtype=torch.long, device=dev …",
        ),
        (
            "generation/decoding_rows.py",
            "… ch.long, device=device), logprobs=torch.ones(0, width, dtype=torch.float64, device= …",
        ),
        (
            "generation/decoding_rows.py",
            "… t64, device=device), cut_logprobs=torch.ones(0, width, dtype=torch.float64, device= …",
        ),
    ],
    "It looks at one token more than is needed.": [
        ("generation/decoding_rows.py", "window = max((len(text.encode('utf-8')) for text in texts)) + 5"),
    ],
    "A NaN stays a NaN.": [
        (
            "generation/decoding_rows.py",
            "… require_finite(kept.logprobs[rows].mean(dim=1), row_name=lambda i: f'prompt {se …",
        ),
    ],
    "One part is sorted again, in whichever order it came.": [
        ("training/learner.py", "if parts >= 1:"),
    ],
    "It waits for a GPU, so that the clock is right, and changes no number.": [
        ("training/update.py", "no torch.cuda.synchronize(policy.device)"),
    ],
    "The result is overwritten or left unread, whatever is in it.": [
        ("irl/curvature.py", "successors, nobody = (ends, np.ones(len(ends)))"),
        ("irl/curvature.py", "means = np.ones_like(successors)"),
        ("irl/fitting.py", "num_steps = 1.0 if actions is None else float(actions.sum())"),
    ],
    "The sum is symmetric but for rounding.": [
        ("irl/curvature.py", "return ((total + total) / 2, means)"),
        ("irl/paths.py", "return (total + total) / 2"),
    ],
    "It is divided by its own sum, or compared with another of its kind.": [
        ("irl/paths.py", "through[self.mdp.terminal] = 2"),
        ("irl/comparison.py", "return float((shaped[0] * shaped[1]).sum())"),
    ],
    "Entries for the same place add up wherever the table is used.": [
        ("irl/paths.py", "no choices.sum_duplicates()"),
    ],
    "What is finite is never looked at again.": [
        (
            "irl/features.py",
            "stored = csr_array(np.where(np.isfinite(table), 1.0, table)) if isinstance(table, ndarray) else table",
        ),
    ],
    "Four moves: the range ends before either number, and equal rows may be repeated in either order.": [
        ("irl/grids.py", "indptr = np.arange(0, columns.size + 2, num_moves, dtype=np.int32)"),
        (
            "irl/grids.py",
            "columns = np.repeat(np.take_along_axis(beside, rank, axis=1)[:, None].astype(np.int32), num_moves, axis=0)",
        ),
    ],
    "Every stored outcome is possible, and no draw but 0 falls on an edge.": [
        (
            "irl_runs/environment.py",
            "outcome = cumulative(table.data[first:last]).searchsorted(self.np_random.random(), side='left')",
        ),
    ],
    "Both say that nothing is known yet: a sweep that changes nothing has settled anyway.": [
        ("irl/planning.py", "seen = change / before if before >= change else 1.0"),
        ("irl/planning.py", "seen = change / before if before > change else 2.0"),
    ],
    "No number falls on the edge.": [
        ("irl/minimisers.py", "if gained <= 1 / 4:"),
        ("irl/minimisers.py", "elif gained >= 3 / 4 and size > 0.9 * radius:"),
        ("irl/minimisers.py", "elif gained > 3 / 4 and size >= 0.9 * radius:"),
    ],
    "It only keeps squares from overflowing, and no entry is more than the group's size times this one.": [
        ("algorithms/advantages.py", "largest = centred.positive().amax(dim=1, keepdim=True)"),
    ],
    "Which solver is used, for speed: each finds the same.": [
        ("irl/feasibility.py", "if not len(units) > 2000:"),
        ("irl/feasibility.py", "if len(units) < 2000:"),
        ("irl/feasibility.py", "if len(units) > 1:"),
    ],
    "Which of two ways is taken, for speed: each finds the same.": [
        ("models/shared_prompt/fused.py", "if not not torch.is_grad_enabled():"),
        ("models/shared_prompt/fused.py", "if torch.is_grad_enabled():"),
        ("generation/sampling.py", "if weights.shape[1] <= SMALL_VOCAB and weights.device.type != 'cpu':"),
        ("generation/sampling.py", "if sampling.top_k == 0 and sampling.top_p == 2:"),
        ("generation/sampling.py", "if sampling.min_p >= 0:"),
        ("training/optimizer.py", "… s=(options.beta1, options.beta2), fused=False) …"),
    ],
    "A run of no tokens has no weight, and is never hit.": [
        ("generation/sampling.py", "if whole <= weights.shape[1]:"),
    ],
    "At step 0, or without lengths, there is nothing to compare with.": [
        ("runs/alarms.py", "step = int(history[-1]['step'] or 1)"),
        ("runs/alarms.py", "first, recent = (fmean(lengths[:HALF] or [1.0]), fmean(lengths[-RECENT:] or [0.0]))"),
        ("runs/alarms.py", "first, recent = (fmean(lengths[:HALF] or [0.0]), fmean(lengths[-RECENT:] or [1.0]))"),
    ],
    "A completion has a token at least, and eight times that is more than 1.": [
        ("runs/alarms.py", "drifted = recent >= DRIFT_FACTOR * first > 1"),
    ],
    "An outcome is a word: its name is never split.": [
        ("runs/alarms.py", "_, function, outcome = name.split('/', 3)"),
        ("runs/alarms.py", "_, _, function, outcome = name.split('/', 4)"),
    ],
    "How far lines are indented.": [
        (
            "runs/manifest.py",
            "return json.dumps({**content, 'sha256': content_hash(content)}, indent=3).encode()",
        ),
    ],
    "Only numbers are taken of it.": [
        (
            "training/optimizer.py",
            "trained = [parameter.clone() for parameter in parameters if parameter.requires_grad]",
        ),
        ("runs/tensor_state.py", "return {name: tensor.clone() for name, tensor in named.items() if name in names}"),
        ("runs/tensor_state.py", "tensor = named[name].clone().cpu().contiguous()"),
        (
            "runs/checkpoint.py",
            "save_file({name: tensor.clone().contiguous() for name, tensor in named.items()}, file)",
        ),
    ],
    "Whatever is left is removed in the end.": [
        ("runs/checkpoint.py", "no shutil.rmtree(doomed)"),
    ],
    "The first part of a vocabulary begins at 0.": [
        ("models/logprobs.py", "self.room = like.new_empty((rows.stop - rows.start) * vocab.stop)"),
        ("models/logprobs.py", "self.room = like.new_empty((rows.stop - rows.start) * (vocab.stop + vocab.start))"),
    ],
    "It copies the output matrix, which costs memory, and computes the same.": [
        ("models/logprobs.py", "shown = matrix if kept is None else matrix.clone()"),
    ],
    "How large a tile is, below its limit: for speed.": [
        ("models/logprobs.py", "for rows in _slices(num_rows, min(TILE_ROWS, elements // vocab)):"),
        ("models/logprobs.py", "yield (rows, _slices(vocab, elements // (rows.stop + rows.start)))"),
        ("models/logprobs.py", "yield (rows, _slices(vocab, elements // rows.stop))"),
        ("models/logprobs.py", "for rows in _slices(num_rows, max(TILE_ROWS, elements % vocab)):"),
    ],
    "Grouped heads are repeated ones.": [
        ("models/shared_prompt/attention.py", "if mask is not None or query.is_cuda:"),
        ("models/shared_prompt/attention.py", "if not (mask is not None and query.is_cuda):"),
    ],
    "No row looks at another, so that it does not matter which fills a gap.": [
        ("generation/decoding_rows.py", "target = [row for row in gone if row < left]"),
    ],
    "One n-gram repeats nothing.": [
        ("runs/alarms.py", "if count <= 1:"),
    ],
    "Any seed does.": [
        ("training/evaluation.py", "rng = np.random.default_rng(1)"),
    ],
    "Both are empty.": [
        ("batch.py", "none = slice(1, 0)"),
    ],
    "Gradients are added to zeros as to nothing.": [
        ("training/update.py", "optimizer.zero_grad(set_to_none=False)"),
    ],
    "Only numbers are taken of it, and the backward pass has freed what its graph held.": [
        ("training/update.py", "detached = replace(view, logprobs=view.logprobs.clone())"),
        ("training/update.py", "observed.entropies.append(view.entropies.clone().double().cpu())"),
        (
            "training/update.py",
            "observed.terms.setdefault(name, []).append(values.clone().double().cpu())",
        ),
        ("training/update.py", "bad = (~torch.isfinite(losses.clone())).nonzero()"),
    ],
    "No token without an advantage is clipped.": [
        (
            "training/update.py",
            "… atio/low_mean': (clipped & (advantages <= 0)).double().sum().item(), 'clip_ratio/ …",
        ),
        (
            "training/update.py",
            "… tio/high_mean': (clipped & (advantages >= 0)).double().sum().item(), 'clip_ratio/ …",
        ),
    ],
    "It is read only where the number is greater.": [
        ("batch.py", "same = i >= first and prompt == self.prompt_of[first]"),
    ],
    "Zeros are never stored.": [
        ("irl/mdp.py", "bad = np.flatnonzero(~(table.data > 0) | ~np.isfinite(table.data))"),
    ],
    "It is only compared with 1.": [
        ("irl/maxent.py", "check_whole(known, mdp, discount=2.0, horizon=None)"),
    ],
    "Any negative number says that no episode has begun.": [
        ("irl_runs/environment.py", "self._state = -2"),
    ],
    "The tests' type checker refuses it before; test_irl_options.py asks in a process that has none.": [
        *(
            (
                file,
                f"no require(is_word(self.{option}, {known}), self, '{option}', \"is unknown; use {known[0]!r} or {known[1]!r}\")",
            )
            for file, option, known in (
                ("irl/causal.py", "objective", ("dual", "likelihood")),
                ("irl/maxent.py", "gradient", ("tilted", "algorithm1")),
            )
        ),
        (
            "irl/causal.py",
            "no require(is_word(self.solver, SOLVERS), self, 'solver', \"is unknown; use 'auto', 'newton' or 'lbfgs'\")",
        ),
    ],
    "Any positive scale of the same order gives the same: it only keeps squares from overflowing.": [
        ("algorithms/advantages.py", "largest = apart.positive().amax()"),
        ("algorithms/credit.py", "largest = max((float(part.positive().amax()) for part in centred))"),
    ],
    "Only whether it is below 0 is asked.": [
        ("algorithms/advantages.py", "lowest = torch.where(rewards.isnan(), 1.0, rewards).min()"),
    ],
    "Zeros are added, or nothing.": [
        (
            "algorithms/credit.py",
            "outcome = rule(replace(evidence, token_rewards=rest if bool((rest != 1).any()) else None)).advantages",
        ),
        ("algorithms/gae.py", "while reach < len(terms) or bool((factor != 0).any()):"),
        ("algorithms/gae.py", "while reach <= len(terms) and bool((factor != 0).any()):"),
        ("algorithms/gae.py", "while reach < len(terms) and bool((factor == 0).any()):"),
        ("algorithms/gae.py", "while reach < len(terms) and bool((factor != 1).any()):"),
        ("algorithms/preference_losses.py", "if label_smoothing == 1:"),
    ],
    "What nothing scored is not counted, whatever it earned.": [
        (
            "algorithms/actor_critic/ppo.py",
            "return own.index_add(0, last[acted], rewards.flatten().nan_to_num(nan=1.0)[acted])",
        ),
        ("algorithms/actor_critic/ppo.py", "others = torch.where(totals.isnan(), 1.0, totals - leave_one_out(totals))"),
    ],
    "Any negative number says that no token was sampled.": [
        (
            "algorithms/actor_critic/ppo.py",
            "last = torch.full((rewards.numel(),), -2).scatter_reduce(0, rollout[known], number[known], 'amax')",
        ),
    ],
    "What is added stands for nothing: only what comes before it is read.": [
        (
            "training/actor_critic/critic.py",
            "return replace(rollout, tokens=(*rollout.tokens, rollout.tokens[-2]), logprobs=(*rollout.logprobs, 0.0))",
        ),
        (
            "training/actor_critic/critic.py",
            "return replace(rollout, tokens=(*rollout.tokens, rollout.tokens[-1]), logprobs=(*rollout.logprobs, 1.0))",
        ),
    ],
    "Any tokens of the vocabulary will do to try it.": [
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 + 5 * place + length) // vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 + 5 * place - length) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 + 5 * place) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 - 5 * place + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(4 + 5 * place + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "rows = [[(3 + 10 * place + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]",
        ),
        (
            "models/classifiers/last_token_scores.py",
            "vocab = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]",
        ),
        ("models/classifiers/last_token_scores.py", "pad_id = pad_id or 1"),
    ],
    "Rows that are scored one by one are so in any batch.": [
        (
            "models/classifiers/last_token_scores.py",
            "for batch in batches(different, 2 if one_by_one else tokens_per_batch):",
        ),
    ],
    "A model gives numbers of one shape.": [
        ("models/classifiers/last_token_scores.py", "if all((logits.ndim != 2 for logits in expected)):"),
        ("models/classifiers/last_token_scores.py", "shape = [*expected[1].shape]"),
    ],
    "A critic never reads its output layer.": [
        (
            "models/classifiers/classifier_body.py",
            "zeros = torch.ones(parameter.shape, dtype=body.dtype, device=body.device)",
        ),
        ("models/classifiers/classifier_body.py", "no setattr(output, name, nn.Parameter(zeros))"),
    ],
}

EQUIVALENT = {place: reason for reason, places in BECAUSE.items() for place in places}
