//! The boundary between two blocks: `hyper_merge` of the one, `hyper_mix` and `norm` of the other in one op.

use super::hyper::{merge_host, merge_shapes, mix_host, shapes};
use super::kv_quant::round;
use super::norm::{norm, norm_host};
use super::packed::Rounded;
use super::values::{cpu, read};
use crate::cpu::deepseek_v4::hyper::{MIXES, STREAMS};
use crate::cuda::deepseek_v4 as gpu;
use crate::hyper_operands::{HyperSpec, HyperWeights};
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Adds a block's output to the streams and computes the next block's input: [`hyper_merge`](super::hyper_merge) by
/// `post` and `comb`, then [`hyper_mix`](super::hyper_mix) with the next block's `weights`, which replaces `post` and
/// `comb`, then [`norm`](super::norm) of the mixed value. All roundings are those of the three ops; sums in f32 may
/// have a different order.
///
/// - `f`: `[tokens, hidden]`, the block's output, of the streams' dtype
/// - `streams`: `[tokens, 4, hidden]` bf16 or f32, in place
/// - `post`: `[tokens, 4]`, `comb`: `[tokens, 4, 4]` f32, in place
/// - `norm_weight`: `[hidden]` bf16; `eps`: of that norm
/// - `mixed`: `[tokens, hidden]` of the streams' dtype, scratch of the separate kernels: undefined afterwards
/// - `out`: `[tokens, hidden]` of the streams' dtype; `low`: result of `round_activation` on `out`, and its packed rows
///
/// `hidden` is a multiple of 8. GPUs run two kernels if the streams are bf16 and `hidden` is a multiple of 256 up to
/// 7,936, otherwise those of the separate ops. A token's results do not depend on the other tokens.
pub fn hyper_merge_mix_norm(
    exec: &mut Exec,
    (f, streams): (&Tensor, &mut Tensor),
    (weights, spec): (&HyperWeights, HyperSpec),
    (post, comb): (&mut Tensor, &mut Tensor),
    (norm_weight, eps): (&Tensor, f32),
    mixed: &mut Tensor,
    (out, low): (&mut Tensor, Option<Rounded<'_>>),
) -> Result<(), OpError> {
    let (low, packed) = low.map_or((None, None), |low| (Some(low.values), low.packed));
    let check = Check("hyper_merge_mix_norm");
    let (tokens, hidden) = shapes(check, streams, weights, MIXES, 3)?;
    merge_shapes(check, f, (post, comb), streams)?;
    check.is(norm_weight, DType::Bf16, &[hidden])?;
    for tensor in [&*mixed, &*out].into_iter().chain(low.as_deref()) {
        check.is(tensor, streams.dtype(), &[tokens, hidden])?;
    }
    exec.record(|_| {
        let HyperWeights { function, base, scale } = weights;
        let reads: [&Tensor; 8] = [streams, function, base, scale, f, post, comb, norm_weight];
        let writes: Vec<&Tensor> = [&*streams, &*post, &*comb, &*out].into_iter().chain(low.as_deref()).collect();
        // Merge, multiplications and squares, weighted sum; the norm.
        let flops = (2 * STREAMS + 2 + 2 * (MIXES + 2)) * streams.elements() + 4 * out.elements();
        OpRecord::new("hyper_merge_mix_norm", "rows", &reads, &writes, flops as u64)
    });
    if exec.device() == Device::Cuda {
        if gpu::has_hyper_merge_mix_norm(streams.dtype(), hidden) {
            let norm = (norm_weight, eps);
            return gpu::hyper_merge_mix_norm(
                exec,
                (f, streams),
                (weights, spec),
                (post, comb),
                norm,
                (out, low, packed),
            );
        }
        gpu::hyper_merge(exec, f, (post, comb), streams)?;
        gpu::hyper_mix(exec, streams, weights, spec, mixed, (post, comb))?;
        return norm(exec, mixed, norm_weight, eps, out, low.map(|values| Rounded { values, packed }));
    }
    if let Some(isa) = cpu(check, exec)? {
        merge_host(f, (post, comb), streams);
        let mut values = mix_host(isa, &read(streams), weights, spec, (post, comb));
        round(&mut values, out.dtype());
        norm_host(values, norm_weight, eps, out, low.map(|values| Rounded { values, packed }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::values::read;
    use super::super::{hyper_merge, hyper_mix, norm};
    use super::*;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    const TOKENS: usize = 3;
    const HIDDEN: usize = 192;
    const SPEC: HyperSpec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: 1e-6 };
    const EPS: f32 = 1e-5;

    /// Seeded values that bf16 does not hold exactly.
    fn fill(host: &mut Host, shape: &[usize], dtype: DType, seed: u64) -> Tensor {
        let mut tensor = host.zeros("x", shape, dtype);
        let values = bf16s(tensor.elements(), seed);
        match dtype {
            DType::Bf16 => tensor.host_mut::<bf16>().copy_from_slice(&values),
            _ => tensor.host_mut().iter_mut().zip(values).for_each(|(x, v)| *x = v.to_f32() * 1.000_3),
        }
        tensor
    }

    fn weights(host: &mut Host) -> HyperWeights {
        HyperWeights {
            function: fill(host, &[MIXES, STREAMS * HIDDEN], DType::F32, 1),
            base: fill(host, &[MIXES], DType::F32, 2),
            scale: fill(host, &[3], DType::F32, 3),
        }
    }

    /// Outputs of the op: streams, post, comb, out, low.
    struct Written {
        streams: Tensor,
        mixing: [Tensor; 2],
        out: Tensor,
        low: Option<Tensor>,
    }

    impl Written {
        fn new(host: &mut Host, dtype: DType, low: bool) -> Self {
            let streams = fill(host, &[TOKENS, STREAMS, HIDDEN], dtype, 4);
            let post = fill(host, &[TOKENS, STREAMS], DType::F32, 5);
            let comb = fill(host, &[TOKENS, STREAMS, STREAMS], DType::F32, 6);
            let out = host.zeros("out", &[TOKENS, HIDDEN], dtype);
            let low = low.then(|| host.zeros("low", &[TOKENS, HIDDEN], dtype));
            Self { streams, mixing: [post, comb], out, low }
        }

        fn equals(&self, other: &Self) {
            let floats = |x: &Tensor| read(x).to_vec();
            assert_eq!(floats(&self.streams), floats(&other.streams));
            assert_eq!(floats(&self.mixing[0]), floats(&other.mixing[0]));
            assert_eq!(floats(&self.mixing[1]), floats(&other.mixing[1]));
            assert_eq!(floats(&self.out), floats(&other.out));
            assert_eq!(self.low.as_ref().map(floats), other.low.as_ref().map(floats));
        }
    }

    fn compare(dtype: DType, low: bool) {
        Host::each(|mut host| {
            let (w, norm_weight) = (weights(&mut host), fill(&mut host, &[HIDDEN], DType::Bf16, 7));
            let f = fill(&mut host, &[TOKENS, HIDDEN], dtype, 8);
            let mut mixed = host.zeros("mixed", &[TOKENS, HIDDEN], dtype);
            let [mut whole, mut parts] = [(); 2].map(|()| Written::new(&mut host, dtype, low));
            let exec = &mut host.exec;

            let [post, comb] = &mut whole.mixing;
            let outputs = (&mut whole.out, whole.low.as_mut().map(Rounded::from));
            let (norm_of, hyper) = ((&norm_weight, EPS), (&w, SPEC));
            hyper_merge_mix_norm(exec, (&f, &mut whole.streams), hyper, (post, comb), norm_of, &mut mixed, outputs)
                .unwrap();

            let [post, comb] = &mut parts.mixing;
            hyper_merge(exec, &f, (post, comb), &mut parts.streams).unwrap();
            hyper_mix(exec, &parts.streams, &w, SPEC, &mut mixed, (post, comb)).unwrap();
            norm(exec, &mixed, &norm_weight, EPS, &mut parts.out, parts.low.as_mut().map(Rounded::from)).unwrap();
            whole.equals(&parts);
        });
    }

    #[test]
    fn it_is_merge_mix_and_norm() {
        compare(DType::Bf16, true);
        compare(DType::Bf16, false);
        compare(DType::F32, false);
    }

    #[test]
    fn an_output_has_the_dtype_of_the_streams() {
        Host::each(|mut host| {
            let (w, norm_weight) = (weights(&mut host), fill(&mut host, &[HIDDEN], DType::Bf16, 7));
            let f = fill(&mut host, &[TOKENS, HIDDEN], DType::Bf16, 8);
            let mut mixed = host.zeros("mixed", &[TOKENS, HIDDEN], DType::F32);
            let Written { mut streams, mixing: [mut post, mut comb], mut out, .. } =
                Written::new(&mut host, DType::F32, false);
            let error = hyper_merge_mix_norm(
                &mut host.exec,
                (&f, &mut streams),
                (&w, SPEC),
                (&mut post, &mut comb),
                (&norm_weight, EPS),
                &mut mixed,
                (&mut out, None),
            )
            .unwrap_err();
            assert!(error.message.contains("expected f32"), "{}", error.message);
        });
    }
}
