//! Comparisons of `count_tokens`, `penalize`, `adjust_logits`, `sample` and `logprobs`: logits updates of every kind,
//! and on every row all sampling parameters and numbers of log-probabilities.

use super::call::{Call, Family, Launch};
use super::case::{EXACT, Output, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::ops::{self, DRAW_WORDS, Draw, NO_MASK, REPORT_WORDS};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Temperature, top-k, top-p, min-p. Logits are from -1 to 1, so the colder ones see a few likely tokens.
const PARAMETERS: [(f32, u32, f32, f32); 8] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.02, 20, 0.95, 0.0),
    (0.05, 0, 0.9, 0.0),
    (0.1, 0, 1.0, 0.05),
    (0.3, 700, 0.5, 0.01),
    (1.0, 50, 1.0, 0.0),
    (100.0, 5000, 0.99, 0.0),
];
/// Numbers of log-probabilities that rows ask for.
const LOGPROBS: [Option<usize>; 4] = [Some(MAX_LOGPROBS), None, Some(0), Some(5)];
/// Relative to the size of a row's log-probabilities, about 12: well within 1e-4.
const LOGPROB_TOLERANCE: f64 = 1e-6;

fn has(record: &OpRecord) -> bool {
    matches!(record.op, "count_tokens" | "penalize" | "adjust_logits" | "sample" | "logprobs")
}

/// Enough variants for every row to have all parameters, or to request every number of log-probabilities.
fn variants(record: &OpRecord) -> Vec<Variant> {
    match record.op {
        "sample" => (0..PARAMETERS.len()).map(Variant::Turn).collect(),
        "logprobs" => (0..LOGPROBS.len()).map(Variant::Turn).collect(),
        _ => vec![Variant::Plain],
    }
}

/// Offset of the rows into their parameters.
fn turn(call: &Call<'_>, values: Values) -> usize {
    let turn = if let Variant::Turn(turn) = call.variant { turn } else { 0 };
    turn + usize::from(values == Values::Earlier)
}

/// The draws of the rows, or the spans, edits and masks.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    launch.extra = match (call.record.op, &call.read[..]) {
        ("count_tokens" | "penalize" | "adjust_logits", [_, inputs @ ..]) => {
            let like = |tensor: &Tensor| allocate(exec, tensor.name(), tensor.shape(), DType::U32);
            inputs.iter().map(like).collect::<Result<_, _>>()?
        }
        ("sample" | "logprobs", [logits, ..]) => {
            vec![allocate(exec, "draws", &[logits.rows_cols().0, DRAW_WORDS], DType::U32)?]
        }
        _ => Vec::new(),
    };
    Ok(())
}

fn fill(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    let turn = turn(call, values);
    match (call.record.op, &call.read[..], &mut launch.written[..], &mut launch.extra[..]) {
        ("count_tokens", _, [counts], [updates, tokens, sampled]) => {
            fill_count_updates(exec, counts, [updates, tokens, sampled], turn)
        }
        ("penalize", _, [logits], [counts, penalties, drafts]) => {
            fill_penalties(exec, logits.rows_cols(), [counts, penalties, drafts], turn)
        }
        ("adjust_logits", _, [logits], [spans, edits, masks]) => {
            fill_logits_updates(exec, logits.rows_cols(), [spans, edits, masks], turn)
        }
        ("sample", [logits, ..], _, [draws]) => exec.fill_rows(draws, &draw_words(logits.rows_cols().0, turn)?),
        ("logprobs", [logits, ..], [out], [draws]) => {
            exec.fill_rows(out, &vec![0u32; out.elements()])?;
            exec.fill_rows(draws, &draw_words(logits.rows_cols().0, turn)?)
        }
        _ => Err(call.unknown()),
    }
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match (call.record.op, &call.read[..], &mut launch.written[..], &mut launch.extra[..]) {
        ("count_tokens", _, [counts], [updates, tokens, sampled]) => {
            let vocab = padded_vocab(counts);
            ops::count_tokens(exec, counts, updates, tokens, sampled, vocab)
        }
        ("penalize", _, [logits], [counts, penalties, drafts]) => {
            ops::penalize(exec, logits, counts, penalties, drafts)
        }
        ("adjust_logits", _, [logits], [spans, edits, masks]) => ops::adjust_logits(exec, logits, spans, edits, masks),
        ("sample", [logits, ..], [out], [draws]) => ops::sample(exec, logits, draws, out),
        ("logprobs", [logits, _, sampled], [out], [draws]) => ops::logprobs(exec, logits, draws, sampled, out),
        _ => Err(call.unknown()),
    }
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    match (call.record.op, &launch.written[..]) {
        ("count_tokens", [counts]) => Ok(vec![counted(exec, counts)?]),
        ("penalize" | "adjust_logits", [logits]) => Ok(vec![adjusted(exec, logits)?]),
        ("sample", [out]) => Ok(vec![drawn(exec, out)?]),
        ("logprobs", [out]) => reported(exec, out),
        _ => Err(call.unknown()),
    }
}

/// Parameters of `rows` rows; each `turn` gives a row different ones.
fn draw_words(rows: usize, turn: usize) -> Result<Vec<u32>, OpError> {
    let draw = |row: usize| {
        let (temperature, top_k, top_p, min_p) = PARAMETERS[(row + turn) % PARAMETERS.len()];
        let params = SamplingParams::new(temperature, top_k, top_p, min_p, row as u64);
        let params = params.map_err(|e| OpError { op: "compare", message: e.to_string() })?;
        Ok(Draw::new(&params, turn as u64, LOGPROBS[(row + turn) % LOGPROBS.len()]).words())
    };
    let words: Vec<_> = (0..rows).map(draw).collect::<Result<_, OpError>>()?;
    Ok(words.into_flattened())
}

/// Edits and masks of every kind, distributed over the rows of logits.
fn fill_logits_updates(
    exec: &mut Exec,
    (rows, vocab): (usize, usize),
    [spans, edits, masks]: [&mut Tensor; 3],
    turn: usize,
) -> Result<(), OpError> {
    let (count, (masked, words)) = (edits.rows_cols().0, masks.rows_cols());
    let first = |row: usize| (row * count / rows) as u32;
    // Every other row has a mask.
    let mask = |row: usize| if row.is_multiple_of(2) { (row % masked) as u32 } else { NO_MASK };
    let edit = |i: usize| {
        let (scale, add): (f32, f32) = ([1.0, 1.3, 0.7][i % 3], [0.0, -0.3, f32::NEG_INFINITY, 2.5][i % 4]);
        [((i + turn) % vocab) as u32, scale.to_bits(), add.to_bits()]
    };
    exec.fill_rows(spans, &(0..rows).flat_map(|row| [first(row), first(row + 1), mask(row)]).collect::<Vec<_>>())?;
    exec.fill_rows(edits, &(0..count).flat_map(edit).collect::<Vec<_>>())?;
    let bits = |i: usize| rng::bits(3 + turn as u64, i as u64) as u32;
    exec.fill_rows(masks, &(0..masked * words).map(bits).collect::<Vec<_>>())
}

/// A vocabulary whose counts need no padding.
fn padded_vocab(counts: &Tensor) -> usize {
    2 * counts.rows_cols().1
}

/// Updates of every slot from zero, with tokens of the prompt and of the output, some of them repeated.
fn fill_count_updates(
    exec: &mut Exec,
    counts: &mut Tensor,
    [updates, tokens, sampled]: [&mut Tensor; 3],
    turn: usize,
) -> Result<(), OpError> {
    let ((slots, _), vocab) = (counts.rows_cols(), padded_vocab(counts));
    let (n, m) = (updates.rows_cols().0, tokens.elements());
    let update = |i: usize| {
        let (first, end) = (i * m / n, (i + 1) * m / n);
        [(i + turn) % slots, 1, first, first + (end - first) / 3, end].map(|word| word as u32)
    };
    let token =
        |i: usize| (rng::bits(5 + turn as u64, i as u64) as usize % if i.is_multiple_of(2) { vocab } else { 7 }) as u32;
    exec.fill_rows(counts, &vec![0u32; counts.elements()])?;
    exec.fill_rows(updates, &(0..n).flat_map(update).collect::<Vec<_>>())?;
    exec.fill_rows(tokens, &(0..m).map(token).collect::<Vec<_>>())?;
    exec.fill_rows(sampled, &vec![0u32; sampled.elements()])
}

/// Penalties of every row but each third one, and counts of half of the vocabulary.
fn fill_penalties(
    exec: &mut Exec,
    (rows, vocab): (usize, usize),
    [counts, penalties, drafts]: [&mut Tensor; 3],
    turn: usize,
) -> Result<(), OpError> {
    let ((slots, words), n) = (counts.rows_cols(), drafts.elements());
    let seed = 9 + turn as u64;
    // Mostly small counts; the bits of a prompt's token are random.
    let bits = |i: usize| rng::bits(seed, i as u64) as u32 & if i.is_multiple_of(2) { 0 } else { 0x8003_8001 };
    let penalty = |row: usize| {
        let slot = if row % 3 == 2 { ops::NO_PENALTIES } else { ((row + turn) % slots) as u32 };
        let weights = [0.25 * (row % 7) as f32, 0.5 - 0.1 * (row % 5) as f32, [1.0, 1.3, 0.7][row % 3]];
        let drafts = [0, if row.is_multiple_of(2) { n as u32 } else { 0 }];
        [slot].into_iter().chain(drafts).chain(weights.map(f32::to_bits))
    };
    exec.fill_rows(counts, &(0..slots * words).map(bits).collect::<Vec<_>>())?;
    exec.fill_rows(penalties, &(0..rows).flat_map(penalty).collect::<Vec<_>>())?;
    exec.fill_rows(drafts, &(0..n).map(|i| (i * 37 % vocab) as u32).collect::<Vec<_>>())
}

/// Counts, two a word.
fn counted(exec: &Exec, counts: &Tensor) -> Result<Output, OpError> {
    let mut words = vec![0u32; counts.elements()];
    exec.read(counts, 0, &mut words)?;
    let values = words.iter().flat_map(|word| [word & 0xffff, word >> 16]).map(|count| count as f32).collect();
    Ok(Output { tolerance: EXACT, row: padded_vocab(counts), values })
}

/// Adjusted logits. A banned token shows as -100: infinities have no difference.
fn adjusted(exec: &Exec, logits: &Tensor) -> Result<Output, OpError> {
    let mut values = vec![0f32; logits.elements()];
    exec.read(logits, 0, &mut values)?;
    values.iter_mut().for_each(|logit| *logit = logit.max(-100.0));
    Ok(Output { tolerance: EXACT, row: logits.rows_cols().1, values })
}

/// Tokens drawn by the rows, which must be equal, because devices agree on weights bit by bit.
fn drawn(exec: &Exec, out: &Tensor) -> Result<Output, OpError> {
    let mut tokens = vec![0u32; out.elements()];
    exec.read(out, 0, &mut tokens)?;
    Ok(Output { tolerance: EXACT, row: 1, values: tokens.iter().map(|&token| token as f32).collect() })
}

/// Ranks and ids, which must be equal, and log-probabilities.
fn reported(exec: &Exec, out: &Tensor) -> Result<Vec<Output>, OpError> {
    let mut words = vec![0u32; out.elements()];
    exec.read(out, 0, &mut words)?;
    // A report is pairs: log-probability and rank, then id and log-probability.
    let of_report = |first: usize, other: usize| {
        let pairs = words.as_chunks::<2>().0.iter().enumerate();
        pairs.map(move |(i, pair)| pair[if i % (REPORT_WORDS / 2) == 0 { first } else { other }])
    };
    let ids = of_report(1, 0).map(|id| id as f32).collect();
    let values = of_report(0, 1).map(f32::from_bits).collect();
    let row = REPORT_WORDS / 2;
    Ok(vec![Output { tolerance: EXACT, row, values: ids }, Output { tolerance: LOGPROB_TOLERANCE, row, values }])
}
