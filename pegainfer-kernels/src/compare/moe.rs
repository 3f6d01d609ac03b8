//! Mixtures of experts: routing, and the experts.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EXACT, Output, Values};
use super::variant::Variant;
use crate::cpu::moe::route as reference;
use crate::ops::moe::{self as ops, RouteSpec};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Tolerance of the experts' results: sums of values in bf16, some of which may have been rounded differently.
const ROUNDED: f64 = 1.0 / 32.0;
/// The same where activations may be rounded to FP8 twice, a sixteenth apart: five standard deviations of the sums.
const ROUNDED_TO_FP8: f64 = 1.0 / 4.0;

/// `route` of DeepSeek-V4 reads more than logits.
fn has(record: &OpRecord) -> bool {
    matches!(record.op, "experts" | "router") || (record.op == "route" && record.reads.len() == 1)
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain, Variant::Shared]
}

fn prepare(_: &mut Exec, _: &mut Call<'_>, _: &mut Launch) -> Result<(), OpError> {
    Ok(())
}

/// Chosen experts: each token has others, but in the variant [`Shared`](Variant::Shared) all tokens have the same.
fn fill(exec: &mut Exec, call: &mut Call<'_>, _: &mut Launch, values: Values) -> Result<(), OpError> {
    let Some(experts) = &call.experts else { return Ok(()) };
    let (tokens, k) = call.read[1].rows_cols();
    let (first, step) = (usize::from(values == Values::Earlier), if call.variant == Variant::Shared { 0 } else { 7 });
    let chosen: Vec<u32> = (0..tokens * k).map(|i| ((first + i / k * step + i % k) % experts.count) as u32).collect();
    exec.fill_rows(&mut call.read[1], &chosen)
}

/// A rule that the shapes of a record allow: they do not show how many of the columns are padding.
fn spec(rows: usize, per_token: usize, variant: Variant) -> RouteSpec {
    let shared = variant == Variant::Shared && per_token > 1 && rows > 8 + per_token;
    // One of the last eight columns is the shared expert's, the others are padding.
    let (experts, chosen) = if shared { (rows - 8, per_token - 1) } else { (rows, per_token) };
    RouteSpec { experts, chosen, normalize: !shared, shared }
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match (&call.read[..], &mut launch.written[..], &call.experts) {
        ([logits], [chosen, weights], None) => {
            let spec = spec(logits.rows_cols().1, chosen.rows_cols().1, call.variant);
            ops::route(exec, logits, spec, (chosen, weights))
        }
        ([x, w], [logits, chosen, weights], None) => {
            ops::router(exec, x, w, router_spec(w, chosen, call.variant), logits, (chosen, weights))
        }
        ([x, chosen, weights], [out], Some(experts)) => ops::experts(exec, x, (chosen, weights), experts, out),
        _ => Err(call.unknown()),
    }
}

fn router_spec(w: &Tensor, chosen: &Tensor, variant: Variant) -> RouteSpec {
    spec(w.rows_cols().0, chosen.rows_cols().1, variant)
}

/// The choice of `router` depends on the rounding of its logits: it is compared with what the reference chooses for
/// the same logits.
fn choices(exec: &Exec, call: &Call<'_>, [logits, chosen, weights]: [&Tensor; 3]) -> Result<Output, OpError> {
    let (spec, tokens) = (router_spec(&call.read[1], chosen, call.variant), chosen.rows_cols().0);
    let (k, rows) = (spec.per_token(), spec.rows());
    let mut host = (vec![0f32; tokens * rows], vec![0u32; tokens * k], vec![0f32; tokens * k]);
    exec.read(logits, 0, &mut host.0)?;
    exec.read(chosen, 0, &mut host.1)?;
    exec.read(weights, 0, &mut host.2)?;
    let mut values = Vec::new();
    for (t, logits) in host.0.chunks_exact(rows).enumerate() {
        let mut expected = (vec![0u32; k], vec![0f32; k]);
        reference::route(logits, spec, (&mut expected.0, &mut expected.1));
        let weights = host.2[t * k..][..k].iter().zip(&expected.1);
        let agrees = host.1[t * k..][..k] == expected.0 && weights.into_iter().all(|(w, e)| (w - e).abs() <= 1e-5 * e);
        values.push(f32::from(u8::from(!agrees)));
    }
    Ok(Output { tolerance: EXACT, row: 1, values })
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    if let ("router", [logits, chosen, weights]) = (call.record.op, &launch.written[..]) {
        outputs.truncate(1);
        outputs.push(choices(exec, call, [logits, chosen, weights])?);
    }
    if let Some(experts) = &call.experts {
        let tolerance = if experts.is_bf16() { ROUNDED } else { ROUNDED_TO_FP8 };
        outputs.iter_mut().for_each(|output| output.tolerance = tolerance);
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Case, compare};
    use crate::ops::moe::Experts;
    use crate::ops::{BlockScales, HeadShape, Matrix};
    use pegainfer_core::isa::Isa;
    use pegainfer_core::tensor::DType;

    const SHAPE: HeadShape = HeadShape { heads: 1, kv_heads: 1, head_dim: 64 };

    /// Records of both ops of a layer with 16 experts and a shared one, of which a token has five.
    fn records(tokens: usize, fp8: bool) -> Vec<OpRecord> {
        let (hidden, width, count, k) = (256, 128, 17, 5);
        let exec = &mut Exec::meta().unwrap();
        let mut tensor = |name: &str, shape: &[usize], dtype| -> Tensor { exec.tensor(name, shape, dtype).unwrap() };
        let mut logits = tensor("logits", &[tokens, 24], DType::F32);
        let router = tensor("router", &[24, hidden], DType::Bf16);
        let mut chosen = tensor("chosen", &[tokens, k], DType::U32);
        let mut weights = tensor("weights", &[tokens, k], DType::F32);
        let x = tensor("x", &[tokens, hidden], DType::Bf16);
        let mut out = tensor("out", &[tokens, hidden], DType::Bf16);
        let mut matrix = |rows: usize, k: usize| match fp8 {
            false => Matrix::Bf16(tensor("w", &[rows, k], DType::Bf16)),
            true => Matrix::Fp8 {
                weight: tensor("w", &[rows, k], DType::U8),
                scale: BlockScales::F32(tensor("s", &[rows / 128, k / 128], DType::F32)),
            },
        };
        let (gate_up, down) = (matrix(count * 2 * width, hidden), matrix(count * hidden, width));
        let experts = Experts { gate_up, down, count, shared: true };
        let (done, records) = exec.recording(|exec| {
            let spec = RouteSpec { experts: 16, chosen: 4, normalize: true, shared: true };
            ops::router(exec, &x, &router, spec, &mut logits, (&mut chosen, &mut weights))?;
            ops::route(exec, &logits, spec, (&mut chosen, &mut weights))?;
            ops::experts(exec, &x, (&chosen, &weights), &experts, &mut out)
        });
        done.unwrap();
        records
    }

    #[test]
    fn instruction_sets_agree() {
        let case = Case { shape: SHAPE, context: 1, rope_theta: 1e6, exact_in_fp8: false };
        for (tokens, fp8) in [(1, false), (9, false), (9, true)] {
            for record in records(tokens, fp8) {
                for isa in Isa::available() {
                    let mut cpus = [Isa::available()[0], isa].map(|isa| Exec::cpu(isa, Some(2)).unwrap());
                    let [reference, tested] = &mut cpus;
                    let found = compare(reference, tested, &record, &case).unwrap().unwrap();
                    assert!(found.ok(), "{} on {}: {:?}", record.op, isa.name(), found.failures);
                }
            }
        }
    }

    #[test]
    fn the_rule_of_a_record_fits_its_shapes() {
        for (rows, per_token) in [(8, 2), (16, 4), (24, 5), (128, 8), (264, 9), (520, 11)] {
            for variant in [Variant::Plain, Variant::Shared] {
                let spec = spec(rows, per_token, variant);
                assert_eq!((spec.rows(), spec.per_token()), (rows, per_token), "{variant:?}");
                assert!(spec.chosen <= spec.experts);
            }
        }
        assert_eq!(spec(264, 9, Variant::Shared).experts, 256);
    }
}
