//! The op of hyper-connections that has CUDA kernels.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::operands::{tensor, unit};
use super::variant::Variant;
use crate::ops::deepseek_v4::{HyperSpec, HyperWeights, hyper_mix};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::OpError;

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

fn has(record: &OpRecord) -> bool {
    record.op == "hyper_mix"
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

/// The weights, which the op takes in a struct that owns them.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let [_, function, base, scale, ..] = &call.record.reads[..] else { return Err(call.unknown()) };
    let mut function = tensor(exec, function, call.case, 1)?;
    let (base, scale) = (tensor(exec, base, call.case, 2)?, tensor(exec, scale, call.case, 3)?);
    // Mixing values of a few units, as trained weights give: of larger ones the sigmoids and the softmax are 0 or 1.
    let elements = function.elements();
    let size = 4.0 / (elements as f32 / 24.0).sqrt();
    exec.write(&mut function, 0..elements, |first, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, v)| *v = size * unit(1, first + i));
    })?;
    launch.hyper = Some(HyperWeights { function, base, scale });
    Ok(())
}

fn fill(_: &mut Exec, _: &mut Call<'_>, _: &mut Launch, _: Values) -> Result<(), OpError> {
    Ok(())
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let ([streams, ..], [mixed, post, comb], Some(weights)) = (&call.read[..], &mut launch.written[..], &launch.hyper)
    else {
        return Err(call.unknown());
    };
    let spec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: EPS };
    hyper_mix(exec, streams, weights, spec, mixed, (post, comb))
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    all_written(exec, call, launch)
}
