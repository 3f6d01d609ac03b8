//! One rank of several without the others, for development and timing.

use super::communicator::{Communicator, record_all_gather, record_all_reduce, to_others};
use crate::exec::{Device, Exec};
use crate::tensor::{DType, OpError, Tensor};
use half::bf16;

/// Name of the kernel in records.
const KERNEL: &str = "loop_back";

/// One rank of several on the CPU, that takes its own part for the part of each other rank. The results are not the model's;
/// shapes, memory and work are those of the rank.
#[derive(Debug)]
pub struct LoopBack {
    /// Ranks that it stands for.
    pub ranks: usize,
}

impl Communicator for LoopBack {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        record_all_reduce(exec, KERNEL, x, self.ranks, to_others(self.ranks, x.bytes()));
        let sum = |part: f32| (1..self.ranks).fold(part, |sum, _| sum + part);
        match (exec.device(), x.dtype()) {
            (Device::Meta, _) => {}
            (_, DType::F32) => x.host_mut::<f32>().iter_mut().for_each(|v| *v = sum(*v)),
            _ => x.host_mut::<bf16>().iter_mut().for_each(|v| *v = bf16::from_f32(sum(v.to_f32()))),
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

    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    fn abort(&self) {}
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
        let end = LoopBack { ranks: 3 };
        end.all_gather(&mut exec, &part, &mut whole).unwrap();
        assert_eq!(whole.host::<f32>(), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 3.0, 4.0]);
        end.all_reduce(&mut exec, &mut part).unwrap();
        assert_eq!(part.host::<f32>(), [3.0, 6.0, 9.0, 12.0]);
    }
}
