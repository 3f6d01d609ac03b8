//! Compares an op on two devices: the same seeded operands, of the shapes that an executor recorded. `pegainfer doctor`
//! checks each op on the user's GPU against its CPU twin with it.

mod batch;
mod delta;
#[cfg(test)]
mod gated;
mod layers;
mod sampling;

use crate::ops::{self, FROM_PREVIOUS, HeadShape};
use batch::Rows;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use rayon::prelude::*;

/// What a recorded call does not say in shapes.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Heads of the attention layers.
    pub shape: HeadShape,
    /// Tokens that the longest row attends to.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

/// How far two devices are apart on one call.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The kernel of the device under test.
    pub kernel: &'static str,
    /// Largest difference of an element.
    pub absolute: f64,
    /// Largest difference of an element, relative to the root mean square of its row in the reference.
    pub relative: f64,
    /// Whether every element is within tolerance.
    pub ok: bool,
}

/// Outputs of one call, on the host and in the CPU's layout.
struct Output {
    /// What an element may differ by, in shares of itself and of its row's root mean square.
    tolerance: f64,
    /// Elements of a row: of what one token, or one KV block, gave.
    row: usize,
    values: Vec<f32>,
}

const EPS: f32 = 1e-6;
/// Tolerance of ids, and of dummy weights.
const EXACT: f64 = 0.0;

/// Calls the op of `record` on `reference` and on `tested` and compares what it writes. `None` for an op that is not
/// known here.
pub fn compare(
    reference: &mut Exec,
    tested: &mut Exec,
    record: &OpRecord,
    case: &Case,
) -> Result<Option<Comparison>, OpError> {
    let Some(expected) = reference.install(|exec| run(exec, record, case))?? else { return Ok(None) };
    let (got, records) = tested.install(|exec| exec.recording(|exec| run(exec, record, case)))?;
    let got = got?.unwrap_or_default();
    let kernel = records.first().map_or("", |record| record.kernel);
    let mut all = Comparison { kernel, absolute: 0.0, relative: 0.0, ok: got.len() == expected.len() };
    for (expected, got) in expected.iter().zip(&got) {
        all.add(expected, got);
    }
    Ok(Some(all))
}

impl Comparison {
    /// An element may differ by a share of itself and of its row's root mean square: a sum of many terms that nearly
    /// cancel keeps the error of the terms.
    fn add(&mut self, expected: &Output, got: &Output) {
        let rows = expected.values.par_chunks(expected.row).zip(got.values.par_chunks(expected.row));
        let (absolute, relative, within) = rows
            .map(|(e, g)| difference(e, g, expected.tolerance))
            .reduce(|| (0.0, 0.0, true), |a, b| (larger(a.0, b.0), larger(a.1, b.1), a.2 && b.2));
        self.ok &= within && expected.values.len() == got.values.len();
        self.absolute = larger(self.absolute, absolute);
        self.relative = larger(self.relative, relative);
    }
}

/// Largest difference of one row, the same relative to the row's root mean square, and whether all are tolerable.
fn difference(expected: &[f32], got: &[f32], tolerance: f64) -> (f64, f64, bool) {
    let squares: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
    let scale = (squares / expected.len() as f64).sqrt();
    let mut all = (0.0, true);
    for (e, g) in expected.iter().zip(got) {
        let apart = (f64::from(*e) - f64::from(*g)).abs();
        all = (larger(all.0, apart), all.1 && apart <= tolerance * (f64::from(e.abs()) + scale));
    }
    (all.0, if all.0 == 0.0 { 0.0 } else { all.0 / scale }, all.1)
}

/// The larger error; NaN is the largest.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Runs one op on one device.
fn run(exec: &mut Exec, record: &OpRecord, case: &Case) -> Result<Option<Vec<Output>>, OpError> {
    let (reads, writes) = (&record.reads, &record.writes);
    let mut read = Vec::new();
    for (i, operand) in reads.iter().enumerate() {
        read.push(tensor(exec, operand, case, i as u64)?);
    }
    if record.op == "embedding" {
        // Every other token is one that the previous step drew.
        let (tokens, drawn) = (read[0].elements() as u32, read[2].elements() as u32);
        let ids: Vec<u32> = (0..tokens).map(|i| if i % 2 == 0 { i } else { FROM_PREVIOUS | (i % drawn) }).collect();
        exec.fill_rows(&mut read[0], &ids)?;
    }
    let mut written = Vec::new();
    for operand in writes {
        // What is read and written begins as what is read.
        let seed = reads.iter().position(|o| o.id == operand.id).map(|i| i as u64);
        written.push(tensor(exec, operand, case, seed.unwrap_or(1 << 16))?);
    }
    match (record.op, &read[..], &mut written[..]) {
        ("embedding", [ids, table, previous], [out]) => ops::embedding(exec, ids, previous, table, out)?,
        ("gather_rows", [x, rows], [out]) => ops::gather_rows(exec, x, rows, out)?,
        ("rms_norm", [x, weight], [out]) => ops::rms_norm(exec, x, weight, EPS, out)?,
        ("linear_add_norm", [x, w, _, norm], [residual, out]) => {
            let mut delta = allocate(exec, "delta", out.shape(), DType::Bf16)?;
            ops::linear_add_norm(exec, x, w, residual, norm, EPS, &mut delta, out)?;
        }
        ("linear", [x, w], [out]) => ops::linear(exec, x, w, out)?,
        ("linear_swiglu", [x, w], [out]) => {
            let mut gate_up = allocate(exec, "gate_up", &[x.rows_cols().0, w.rows_cols().0], DType::Bf16)?;
            ops::linear_swiglu(exec, x, w, &mut gate_up, out)?;
        }
        ("qk_norm_rope_write_kv", [qkv, q_norm, k_norm, rope, positions, slots], [q, k, v]) => {
            let (norms, at) = ((q_norm, k_norm), (positions, slots));
            ops::qk_norm_rope_write_kv(exec, qkv, norms, rope, at, case.shape, EPS, q, (k, v))?;
        }
        ("attention", [q, k, v, ..], [out]) => {
            let tables = Rows::new(q.rows_cols().0, &reads[5], k.rows_cols().0, case).upload(exec)?;
            let scale = (case.shape.head_dim as f32).sqrt().recip();
            ops::attention(exec, q, (k, v), &tables.batch(), case.shape, scale, out)?;
        }
        ("decode_attention", [qkv, q_norm, k_norm, rope, ..], [out, k, v]) => {
            let rows = Rows::new(qkv.rows_cols().0, &reads[10], k.rows_cols().0, case);
            let ((positions, slots), tables) = (rows.newest(exec)?, rows.upload(exec)?);
            let mut q = allocate(exec, "q", out.shape(), DType::Bf16)?;
            let (norms, at, batch) = ((q_norm, k_norm), (&positions, &slots), tables.batch());
            ops::decode_attention(exec, qkv, norms, rope, at, &batch, case.shape, EPS, (k, v), &mut q, out)?;
        }
        ("gated_qk_norm_rope_write_kv", [projected, q_norm, k_norm, rope, positions, slots], [q, k, v]) => {
            let (norms, at) = ((q_norm, k_norm), (positions, slots));
            ops::gated_qk_norm_rope_write_kv(exec, projected, norms, rope, at, case.shape, EPS, q, (k, v))?;
        }
        ("attention_gate", [projected, _], [attended]) => {
            ops::attention_gate(exec, projected, case.shape, attended)?;
        }
        ("gated_decode_attention", [projected, q_norm, k_norm, rope, ..], [out, k, v]) => {
            let rows = Rows::new(projected.rows_cols().0, &reads[10], k.rows_cols().0, case);
            let ((positions, slots), tables) = (rows.newest(exec)?, rows.upload(exec)?);
            let mut q = allocate(exec, "q", out.shape(), DType::Bf16)?;
            let (norms, at, batch) = ((q_norm, k_norm), (&positions, &slots), tables.batch());
            ops::gated_decode_attention(
                exec,
                projected,
                norms,
                rope,
                at,
                &batch,
                case.shape,
                EPS,
                (k, v),
                &mut q,
                out,
            )?;
        }
        ("decode_layers", ..) => return layers::decode_layers(exec, record, &read, &mut written, case).map(Some),
        ("adjust_logits", [_, spans, edits, masks], [logits]) => {
            return sampling::adjust(exec, logits, spans, edits, masks).map(Some);
        }
        ("sample", [logits, _], [out]) => return sampling::sample(exec, logits, out).map(Some),
        ("uniform", [], [out]) => {
            ops::uniform(exec, 5, 0.02, out)?;
            return Ok(Some(vec![Output { tolerance: EXACT, ..output(exec, out, case)? }]));
        }
        ("logprobs", [logits, _, sampled], [out]) => return sampling::logprobs(exec, logits, sampled, out).map(Some),
        (op, read, written) => return delta::run(exec, op, read, written, case),
    }
    written.iter().map(|tensor| output(exec, tensor, case)).collect::<Result<_, _>>().map(Some)
}

fn allocate(exec: &mut Exec, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, OpError> {
    exec.tensor(name, shape, dtype).map_err(|e| OpError { op: "compare", message: format!("{name}: {e}") })
}

/// A tensor like `operand`, the same values on every device for the same seed.
fn tensor(exec: &mut Exec, operand: &Operand, case: &Case, seed: u64) -> Result<Tensor, OpError> {
    if operand.name == "rope" {
        let failed = |e: std::io::Error| OpError { op: "compare", message: e.to_string() };
        return ops::rope_table(exec, operand.shape[0], operand.shape[1], case.rope_theta).map_err(failed);
    }
    let cache = cache_index(&operand.name);
    let shape = cache.map(|i| case.shape.cache(exec.device(), operand.shape[0])[i]);
    let shape = shape.as_ref().map_or(operand.shape.as_slice(), |shape| shape);
    let mut tensor = allocate(exec, &operand.name, shape, operand.dtype)?;
    let elements = tensor.elements();
    match operand.dtype {
        DType::Bf16 => {
            let place = cpu_order(exec, cache, case);
            exec.write(&mut tensor, 0..elements, |first, out: &mut [bf16]| {
                let value = |i: usize| bf16::from_f32(unit(seed, place(i)));
                out.par_iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
            })?;
        }
        DType::F32 => exec.write(&mut tensor, 0..elements, |first, out: &mut [f32]| {
            let vocab = operand.shape.last().copied().unwrap_or(1);
            let logits = operand.name == "logits";
            let value = |i: usize| if logits { sampling::logit(seed, i, vocab) } else { unit(seed, i) };
            out.par_iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
        })?,
        DType::U32 => {
            // Ids, positions, slots and rows all count from 0; distinct, because slots must be.
            let ids: Vec<u32> = (0..elements as u32).rev().collect();
            exec.fill_rows(&mut tensor, &ids)?;
        }
        DType::U8 => exec.write(&mut tensor, 0..elements, |first, out: &mut [u8]| {
            out.iter_mut().enumerate().for_each(|(i, v)| *v = (rng::bits(seed, (first + i) as u64) >> 56) as u8);
        })?,
    }
    Ok(tensor)
}

/// Which of the two caches a tensor of this name is.
fn cache_index(name: &str) -> Option<usize> {
    ["kv.k", "kv.v"].iter().position(|cache| *cache == name)
}

/// Where an element of this device's tensor lies in the CPU's.
fn cpu_order(exec: &Exec, cache: Option<usize>, case: &Case) -> impl Fn(usize) -> usize + Sync + use<> {
    let (shape, cache) = (case.shape, cache.filter(|_| exec.device() == Device::Cuda));
    move |i| cache.map_or(i, |cache| shape.cpu_index(cache == 0, i))
}

/// In [-1, 1).
fn unit(seed: u64, i: usize) -> f32 {
    (rng::bits(seed, i as u64) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn output(exec: &Exec, tensor: &Tensor, case: &Case) -> Result<Output, OpError> {
    let n = tensor.elements();
    let (tolerance, values): (f64, Vec<f32>) = match tensor.dtype() {
        DType::Bf16 => {
            let mut host = vec![bf16::ZERO; n];
            exec.read(tensor, 0, &mut host)?;
            (1.0 / 64.0, host.par_iter().map(|v| v.to_f32()).collect())
        }
        DType::F32 => {
            let mut host = vec![0f32; n];
            exec.read(tensor, 0, &mut host)?;
            (1.0 / 1024.0, host)
        }
        DType::U32 => {
            let mut host = vec![0u32; n];
            exec.read(tensor, 0, &mut host)?;
            (EXACT, host.iter().map(|v| *v as f32).collect())
        }
        DType::U8 => {
            let mut host = vec![0u8; n];
            exec.read(tensor, 0, &mut host)?;
            (EXACT, host.iter().map(|v| f32::from(*v)).collect())
        }
    };
    let place = cpu_order(exec, cache_index(tensor.name()), case);
    let mut ordered = vec![0.0; n];
    values.iter().enumerate().for_each(|(i, v)| ordered[place(i)] = *v);
    Ok(Output { tolerance, row: tensor.rows_cols().1, values: ordered })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_seen() {
        let output = |values: &[f32]| Output { tolerance: 1.0 / 64.0, row: 3, values: values.to_vec() };
        let judge = |got: &[f32]| {
            let mut all = Comparison { kernel: "", absolute: 0.0, relative: 0.0, ok: true };
            all.add(&output(&[1.0, -2.0, 0.0]), &output(got));
            all.ok
        };
        assert!(judge(&[1.0, -2.0, 0.001]));
        assert!(!judge(&[1.0, -2.0, 0.1]));
        assert!(!judge(&[1.0, f32::NAN, 0.0]));
        assert!(!judge(&[1.0, -2.0]));
    }
}
