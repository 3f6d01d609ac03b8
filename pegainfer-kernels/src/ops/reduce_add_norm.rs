//! The end of a block on several ranks: the sum of their parts of its last projection, the residual add, and the norm
//! before the next block.

use super::activation::ActivationMut;
use super::add_rms_norm::add_rms_norm;
use super::check::Check;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `residual += Σ_rank partial`, then `out = rms_norm(residual) * norm`, with the same bits on every rank.
///
/// `partial`: `[rows, hidden]` bf16, this rank's part of a projection whose input columns are split over the ranks;
/// undefined afterwards. `residual`, `out`: `[rows, hidden]` bf16, equal on all ranks, `out` also
/// [in FP8](super::Activation); `norm`: `[hidden]` bf16 or f32, as in [`rms_norm`](super::rms_norm).
///
/// The sum is that of [`Communicator::all_reduce`]: f32, in rank order, rounded to bf16. It is rounded again after it
/// is added to the residual, as in [`linear_add_norm`](super::linear_add_norm). Recorded as one op where the
/// communicator fuses it, otherwise as an all-reduce and an [`add_rms_norm`]. Fails if a shape or dtype differs, or if
/// another rank fails.
pub fn reduce_add_norm<'o>(
    exec: &mut Exec,
    comm: &dyn Communicator,
    partial: &mut Tensor,
    residual: &mut Tensor,
    norm: &Tensor,
    eps: f32,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (check, out) = (Check("reduce_add_norm"), out.into());
    let (rows, hidden) = partial.rows_cols();
    check.is(partial, DType::Bf16, &[rows, hidden])?;
    check.is(residual, DType::Bf16, &[rows, hidden])?;
    check.is_activation(out.tensor, &[rows, hidden])?;
    check.is_norm(norm, hidden)?;
    let out = out.in_norm_format(exec)?;
    if comm.reduce_add_norm(exec, partial, residual, norm, eps, out)? {
        return Ok(());
    }
    comm.all_reduce(exec, partial)?;
    add_rms_norm(exec, partial, residual, norm, eps, out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::loop_back;
    use crate::testing::bf16s;
    use half::bf16;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::parallel::Local;

    const SHAPE: [usize; 2] = [3, 256];

    fn tensor(exec: &mut Exec, shape: &[usize], values: &[bf16]) -> Tensor {
        let mut tensor = exec.tensor("x", shape, DType::Bf16).unwrap();
        exec.fill_rows(&mut tensor, values).unwrap();
        tensor
    }

    /// Residual, and the memory of `out`, written as `dtype`, of each of `ranks` ranks.
    fn on_ranks(ranks: usize, dtype: DType) -> Vec<(Vec<bf16>, Vec<u8>)> {
        let run = |(rank, end): (usize, Local)| {
            let exec = &mut Exec::cpu(Isa::Portable, Some(1)).unwrap();
            let elements = SHAPE[0] * SHAPE[1];
            let mut partial = tensor(exec, &SHAPE, &bf16s(elements, 10 + rank as u64));
            let mut residual = tensor(exec, &SHAPE, &bf16s(elements, 1));
            let norm = tensor(exec, &SHAPE[1..], &bf16s(SHAPE[1], 2));
            // Memory for rows in multiples of four, which FP8 takes.
            let mut out = exec.tensor("out", &[4, SHAPE[1]], DType::Bf16).unwrap();
            out.set_rows(SHAPE[0]);
            out.set_dtype(dtype);
            reduce_add_norm(exec, &end, &mut partial, &mut residual, &norm, 1e-6, &mut out).unwrap();
            (residual.host().to_vec(), out.host_storage().to_vec())
        };
        std::thread::scope(|scope| {
            let ends = Local::new(ranks).into_iter().enumerate();
            let threads: Vec<_> = ends.map(|end| scope.spawn(move || run(end))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The same of one rank that has the sum of all parts.
    fn of_sum(ranks: usize, dtype: DType) -> (Vec<bf16>, Vec<u8>) {
        let exec = &mut Exec::cpu(Isa::Portable, Some(1)).unwrap();
        let elements = SHAPE[0] * SHAPE[1];
        let parts: Vec<_> = (0..ranks).map(|rank| bf16s(elements, 10 + rank as u64)).collect();
        let sum = |i: usize| bf16::from_f32(parts.iter().fold(0.0, |sum, part| sum + part[i].to_f32()));
        let x = tensor(exec, &SHAPE, &(0..elements).map(sum).collect::<Vec<_>>());
        let mut residual = tensor(exec, &SHAPE, &bf16s(elements, 1));
        let norm = tensor(exec, &SHAPE[1..], &bf16s(SHAPE[1], 2));
        let mut out = exec.tensor("out", &[4, SHAPE[1]], DType::Bf16).unwrap();
        out.set_rows(SHAPE[0]);
        out.set_dtype(dtype);
        add_rms_norm(exec, &x, &mut residual, &norm, 1e-6, &mut out).unwrap();
        (residual.host().to_vec(), out.host_storage().to_vec())
    }

    #[test]
    fn every_rank_adds_and_normalises_the_sum_of_all_parts() {
        for ranks in [1, 2, 4] {
            for dtype in [DType::Bf16, DType::E4m3] {
                let expected = of_sum(ranks, dtype);
                for (rank, got) in on_ranks(ranks, dtype).iter().enumerate() {
                    assert!(*got == expected, "rank {rank} of {ranks}, {dtype}");
                }
            }
        }
    }

    #[test]
    fn a_plan_has_one_op_where_gpus_fuse_it() {
        let ops = |ranks, rows| {
            let exec = &mut Exec::meta().unwrap();
            let comm = loop_back(exec, 0, ranks).unwrap();
            let [mut partial, mut residual, mut out] =
                [0, 1, 2].map(|_| exec.tensor("x", &[rows, 5120], DType::Bf16).unwrap());
            let norm = exec.tensor("norm", &[5120], DType::Bf16).unwrap();
            let call =
                |exec: &mut Exec| reduce_add_norm(exec, &*comm, &mut partial, &mut residual, &norm, 1e-6, &mut out);
            let (result, records) = exec.recording(call);
            result.unwrap();
            records.iter().map(|record| (record.op, record.kernel, record.sent)).collect::<Vec<_>>()
        };
        assert_eq!(ops(2, 1), [("reduce_add_norm", "low_latency", 2 * 10_240)]);
        assert_eq!(ops(2, 4096), [("reduce_add_norm", "one_shot", 4096 * 10_240)]);
        let sent = 2 * 3 * 4096 * 10_240 / 4;
        assert_eq!(ops(4, 4096), [("all_reduce", "two_shot", sent), ("add_rms_norm", "rows", 0)]);
    }

    #[test]
    fn a_wrong_operand_is_named_before_ranks_meet() {
        let exec = &mut Exec::cpu(Isa::Portable, Some(1)).unwrap();
        let end = &Local::new(2)[0];
        let [mut partial, mut residual] = [0, 1].map(|_| exec.tensor("x", &SHAPE, DType::Bf16).unwrap());
        let norm = exec.tensor("narrow", &[SHAPE[1] - 8], DType::Bf16).unwrap();
        let mut out = exec.tensor("out", &SHAPE, DType::Bf16).unwrap();
        let error = reduce_add_norm(exec, end, &mut partial, &mut residual, &norm, 1e-6, &mut out).unwrap_err();
        assert!(error.to_string().contains("narrow is"), "{error}");
    }
}
