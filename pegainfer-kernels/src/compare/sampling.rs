//! Comparisons of `adjust_logits`, `sample` and `logprobs`: rules of every kind, every way to sample on every row, and
//! reports taken apart.

use super::{Call, EXACT, Output, allocate, unit};
use crate::ops::{self, DRAW_WORDS, Draw, NO_MASK, REPORT_WORDS};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Exec;
use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Temperature, top-k, top-p, min-p. Logits are from -1 to 1, so the colder ones see a few likely tokens.
const WAYS: [(f32, u32, f32, f32); 8] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.02, 20, 0.95, 0.0),
    (0.05, 0, 0.9, 0.0),
    (0.1, 0, 1.0, 0.05),
    (0.3, 700, 0.5, 0.01),
    (1.0, 50, 1.0, 0.0),
    (100.0, 5000, 0.99, 0.0),
];
/// Reports that rows ask for.
const REPORTS: [Option<usize>; 4] = [Some(MAX_LOGPROBS), None, Some(0), Some(5)];
/// Relative to the size of a row's log-probabilities, about 12: well within 1e-4.
const LOGPROB: f64 = 1e-6;

/// Calls the op, if it is one of these.
pub(super) fn run(exec: &mut Exec, call: &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError> {
    let outputs = match (call.record.op, &call.read[..], &mut call.written[..]) {
        ("adjust_logits", [_, spans, edits, masks], [logits]) => adjust(exec, logits, spans, edits, masks)?,
        ("sample", [logits, _], [out]) => sample(exec, logits, out)?,
        ("logprobs", [logits, _, sampled], [out]) => logprobs(exec, logits, sampled, out)?,
        _ => return Ok(None),
    };
    Ok(Some(outputs))
}

/// A logit in [-1, 1); odd rows have ties.
pub(super) fn logit(seed: u64, i: usize, vocab: usize) -> f32 {
    let x = unit(seed, i);
    if i / vocab % 2 == 1 { (x * 256.0).round() / 256.0 } else { x }
}

/// Parameters of `rows` rows: each call `turn` gives a row another way.
fn draws(exec: &mut Exec, rows: usize, turn: usize) -> Result<Tensor, OpError> {
    let draw = |row: usize| {
        let (temperature, top_k, top_p, min_p) = WAYS[(row + turn) % WAYS.len()];
        let params = SamplingParams::new(temperature, top_k, top_p, min_p, row as u64);
        let params = params.map_err(|e| OpError { op: "compare", message: e.to_string() })?;
        Ok(Draw::new(&params, turn as u64, REPORTS[(row + turn) % REPORTS.len()]))
    };
    let words: Vec<Draw> = (0..rows).map(draw).collect::<Result<_, OpError>>()?;
    let mut tensor = allocate(exec, "draws", &[rows, DRAW_WORDS], DType::U32)?;
    exec.fill_rows(&mut tensor, &words.iter().flat_map(Draw::words).collect::<Vec<_>>())?;
    Ok(tensor)
}

/// Logits under edits and masks of every kind, which the rows share out. A banned token shows as -100: infinities have no
/// difference.
fn adjust(
    exec: &mut Exec,
    logits: &mut Tensor,
    spans: &Tensor,
    edits: &Tensor,
    masks: &Tensor,
) -> Result<Vec<Output>, OpError> {
    let ((rows, vocab), count) = (logits.rows_cols(), edits.rows_cols().0);
    let (masked, words) = masks.rows_cols();
    let first = |row: usize| (row * count / rows) as u32;
    // Every other row has a mask.
    let mask = |row: usize| if row.is_multiple_of(2) { (row % masked) as u32 } else { NO_MASK };
    let mut like = |tensor: &Tensor, words: Vec<u32>| {
        let mut copy = allocate(exec, tensor.name(), tensor.shape(), DType::U32)?;
        exec.fill_rows(&mut copy, &words)?;
        Ok::<_, OpError>(copy)
    };
    let spans = like(spans, (0..rows).flat_map(|row| [first(row), first(row + 1), mask(row)]).collect())?;
    let edit = |i: usize| {
        let (scale, add): (f32, f32) = ([1.0, 1.3, 0.7][i % 3], [0.0, -0.3, f32::NEG_INFINITY, 2.5][i % 4]);
        [(i % vocab) as u32, scale.to_bits(), add.to_bits()]
    };
    let edits = like(edits, (0..count).flat_map(edit).collect())?;
    let masks = like(masks, (0..masked * words).map(|i| rng::bits(3, i as u64) as u32).collect())?;
    ops::adjust_logits(exec, logits, &spans, &edits, &masks)?;
    let mut values = vec![0f32; rows * vocab];
    exec.read(logits, 0, &mut values)?;
    values.iter_mut().for_each(|logit| *logit = logit.max(-100.0));
    Ok(vec![Output { tolerance: EXACT, row: vocab, values }])
}

/// The tokens that each row draws in each way. They must be equal: devices agree on weights bit by bit.
fn sample(exec: &mut Exec, logits: &Tensor, out: &mut Tensor) -> Result<Vec<Output>, OpError> {
    let rows = logits.rows_cols().0;
    let mut outputs = Vec::new();
    for turn in 0..WAYS.len() {
        let draws = draws(exec, rows, turn)?;
        ops::sample(exec, logits, &draws, out)?;
        let mut tokens = vec![0u32; rows];
        exec.read(out, 0, &mut tokens)?;
        outputs.push(Output { tolerance: EXACT, row: 1, values: tokens.iter().map(|&token| token as f32).collect() });
    }
    Ok(outputs)
}

/// Ranks and ids, which must be equal, and log-probabilities of each row's report of every length.
fn logprobs(exec: &mut Exec, logits: &Tensor, sampled: &Tensor, out: &mut Tensor) -> Result<Vec<Output>, OpError> {
    let rows = logits.rows_cols().0;
    let mut outputs = Vec::new();
    for turn in 0..REPORTS.len() {
        let draws = draws(exec, rows, turn)?;
        exec.fill_rows(out, &vec![0u32; rows * REPORT_WORDS])?;
        ops::logprobs(exec, logits, &draws, sampled, out)?;
        let mut words = vec![0u32; rows * REPORT_WORDS];
        exec.read(out, 0, &mut words)?;
        // A report is pairs: log-probability and rank, then id and log-probability.
        let of_report = |first: usize, other: usize| {
            let pairs = words.as_chunks::<2>().0.iter().enumerate();
            pairs.map(move |(i, pair)| pair[if i % (REPORT_WORDS / 2) == 0 { first } else { other }])
        };
        let ids = of_report(1, 0).map(|id| id as f32).collect();
        let values = of_report(0, 1).map(f32::from_bits).collect();
        outputs.push(Output { tolerance: EXACT, row: REPORT_WORDS / 2, values: ids });
        outputs.push(Output { tolerance: LOGPROB, row: REPORT_WORDS / 2, values });
    }
    Ok(outputs)
}
