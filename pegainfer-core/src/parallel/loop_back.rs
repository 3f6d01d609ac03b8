//! One rank of several without the others, for development and timing.

use super::communicator::{
    Communicator, record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_scatter, rows_of_rank,
    to_others,
};
use crate::exec::{Device, Exec};
use crate::tensor::{DType, OpError, Tensor};
use half::bf16;
use std::ops::Range;

/// Name of the kernel in records.
const KERNEL: &str = "loop_back";

/// One of several ranks, on the CPU, that uses its own contribution in place of the others'. Results are not the
/// model's; shapes, memory and work are those of the rank.
#[derive(Debug)]
pub struct LoopBack {
    /// Number of this rank.
    pub rank: usize,
    /// Number of ranks that it stands for.
    pub ranks: usize,
}

impl LoopBack {
    /// The sum of `part` and one equal part per other rank.
    fn sum(&self, part: f32) -> f32 {
        (1..self.ranks).fold(part, |sum, _| sum + part)
    }

    /// Replaces these elements of `x`, f32 or bf16, by their sums.
    fn sum_elements(&self, x: &mut Tensor, elements: Range<usize>) {
        match x.dtype() {
            DType::F32 => x.host_mut::<f32>()[elements].iter_mut().for_each(|v| *v = self.sum(*v)),
            _ => x.host_mut::<bf16>()[elements].iter_mut().for_each(|v| *v = bf16::from_f32(self.sum(v.to_f32()))),
        }
    }
}

impl Communicator for LoopBack {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        record_all_reduce(exec, KERNEL, x, self.ranks, to_others(self.ranks, x.bytes()));
        if exec.device() != Device::Meta {
            self.sum_elements(x, 0..x.elements());
        }
        Ok(())
    }

    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
        record_all_gather(exec, KERNEL, part, whole, self.ranks);
        if exec.device() != Device::Meta {
            let width = part.rows_cols().1;
            let parts = part.host::<f32>().chunks_exact(width);
            let rows = whole.host_mut::<f32>().chunks_exact_mut(self.ranks * width);
            rows.zip(parts).for_each(|(row, part)| row.chunks_exact_mut(width).for_each(|to| to.copy_from_slice(part)));
        }
        Ok(())
    }

    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let each = rows_of_rank("reduce_scatter", x, self.ranks)? * x.rows_cols().1;
        record_reduce_scatter(exec, KERNEL, x, self.ranks);
        if exec.device() != Device::Meta {
            self.sum_elements(x, self.rank * each..(self.rank + 1) * each);
        }
        Ok(())
    }

    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let each = rows_of_rank("all_gather_rows", x, self.ranks)? * x.rows_cols().1;
        record_all_gather_rows(exec, KERNEL, x, self.ranks);
        let own = self.rank * each..(self.rank + 1) * each;
        match (exec.device(), x.dtype()) {
            (Device::Meta, _) => {}
            (_, DType::F32) => repeat(x.host_mut::<f32>(), own),
            _ => repeat(x.host_mut::<bf16>(), own),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    fn abort(&self) {}
}

/// Copies the values at `own` to the places of all other ranks.
fn repeat<T: Copy>(values: &mut [T], own: Range<usize>) {
    (0..values.len()).step_by(own.len().max(1)).for_each(|first| values.copy_within(own.clone(), first));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn every_part_is_its_own() {
        let mut exec = Exec::cpu(Isa::Portable, Some(1)).unwrap();
        let mut part = exec.tensor("part", &[2, 2], DType::F32).unwrap();
        exec.fill_rows(&mut part, &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        let mut whole = exec.tensor("whole", &[2, 6], DType::F32).unwrap();
        let end = LoopBack { rank: 1, ranks: 3 };
        end.all_gather(&mut exec, &part, &mut whole).unwrap();
        assert_eq!(whole.host::<f32>(), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 3.0, 4.0]);
        end.all_reduce(&mut exec, &mut part).unwrap();
        assert_eq!(part.host::<f32>(), [3.0, 6.0, 9.0, 12.0]);
        let mut rows = exec.tensor("rows", &[3, 1], DType::F32).unwrap();
        exec.fill_rows(&mut rows, &[1.0f32, 2.0, 3.0]).unwrap();
        end.reduce_scatter(&mut exec, &mut rows).unwrap();
        end.all_gather_rows(&mut exec, &mut rows).unwrap();
        assert_eq!(rows.host::<f32>(), [6.0; 3]);
        let mut halves = exec.tensor("halves", &[3, 1], DType::Bf16).unwrap();
        exec.fill_rows(&mut halves, &[1.0, 1.0078125, 2.0].map(bf16::from_f32)).unwrap();
        end.reduce_scatter(&mut exec, &mut halves).unwrap();
        // 3 * 1.0078125 = 3.0234375 is not representable in bf16.
        assert_eq!(halves.host::<bf16>()[1].to_f32(), 3.03125);
    }
}
