//! Compares an op on two devices: the same seeded operands, of the shapes that an executor recorded. `pegainfer doctor`
//! checks each op on the user's GPU against its CPU twin with it.

mod attention;
mod batch;
mod delta;
mod dense;
#[cfg(test)]
mod gated;
#[cfg(feature = "deepseek-v4")]
mod hyper;
mod layers;
mod operands;
mod sampling;

use crate::ops::HeadShape;
use operands::{allocate, output, tensor, unit};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};
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

/// A recorded call with its operands on one device.
struct Call<'a> {
    record: &'a OpRecord,
    case: &'a Case,
    read: Vec<Tensor>,
    written: Vec<Tensor>,
}

impl<'a> Call<'a> {
    fn new(exec: &mut Exec, record: &'a OpRecord, case: &'a Case) -> Result<Self, OpError> {
        let (reads, writes) = (&record.reads, &record.writes);
        let mut read = Vec::new();
        for (i, operand) in reads.iter().enumerate() {
            read.push(tensor(exec, operand, case, i as u64)?);
        }
        let mut written = Vec::new();
        for operand in writes {
            // What is read and written begins as what is read.
            let seed = reads.iter().position(|o| o.id == operand.id).map(|i| i as u64);
            written.push(tensor(exec, operand, case, seed.unwrap_or(1 << 16))?);
        }
        Ok(Self { record, case, read, written })
    }

    /// All that was written.
    fn outputs(&self, exec: &Exec) -> Result<Vec<Output>, OpError> {
        self.written.iter().map(|tensor| output(exec, tensor, self.case)).collect()
    }
}

/// Calls an op if it is one of a family, and gives what it wrote.
type Family = fn(&mut Exec, &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError>;

const FAMILIES: &[Family] = &[
    dense::run,
    attention::run,
    delta::run,
    layers::run,
    sampling::run,
    #[cfg(feature = "deepseek-v4")]
    hyper::run,
];

/// Runs one op on one device.
fn run(exec: &mut Exec, record: &OpRecord, case: &Case) -> Result<Option<Vec<Output>>, OpError> {
    let mut call = Call::new(exec, record, case)?;
    for family in FAMILIES {
        let outputs = family(exec, &mut call)?;
        if outputs.is_some() {
            return Ok(outputs);
        }
    }
    Ok(None)
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
