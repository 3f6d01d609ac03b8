//! The kernels that bring a step what it takes from the host, and the host what it leaves.

use super::images;
use pegainfer_core::cuda::CopyKernels;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// Of a block.
const THREADS: usize = 256;
/// Of a thread, as in csrc/copy.cu.
const WORDS: usize = 8;

/// Lets kernels instead of a copy engine fill tensors and read them back. To be called on a GPU only.
pub(crate) fn copy_by_kernels(exec: &mut Exec) -> Result<(), OpError> {
    let kernels = CopyKernels { image: &images::COPY, upload: "upload", land: "land", threads: THREADS, words: WORDS };
    exec.gpu()?.copy_by(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use pegainfer_core::readback::Readback;
    use pegainfer_core::rng;
    use pegainfer_core::tensor::{DType, Tensor};

    /// A GPU that copies by an engine, and one that copies by kernels.
    fn both() -> [Exec; 2] {
        let mut both = [0, 1].map(|_| Exec::cuda(0, Some(2)).unwrap());
        copy_by_kernels(&mut both[1]).unwrap();
        both
    }

    fn words(n: usize, seed: u64) -> Vec<u32> {
        (0..n as u64).map(|i| rng::bits(seed, i) as u32).collect()
    }

    /// All of a tensor, over an engine.
    fn held(exec: &Exec, tensor: &mut Tensor) -> Vec<u32> {
        tensor.set_rows(tensor.max_rows());
        let mut words = vec![0; tensor.elements()];
        exec.read(tensor, 0, &mut words).unwrap();
        words
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn every_shape_arrives_and_nothing_else_is_written() {
        for mut exec in both() {
            let mut table = exec.tensor("table", &[300, 999], DType::U32).unwrap();
            let mut expected = vec![0; table.elements()];
            // The last ones take several pieces of staging memory.
            for (i, (rows, width)) in
                [(1, 1), (3, 7), (256, 8), (300, 257), (2, 999), (300, 999)].into_iter().enumerate()
            {
                let values = words(rows * width, i as u64);
                exec.fill_columns(&mut table, width, &values).unwrap();
                let to = expected.chunks_exact_mut(999).zip(values.chunks_exact(width));
                to.for_each(|(to, from)| to[..width].copy_from_slice(from));
                assert!(held(&exec, &mut table) == expected, "{rows} rows of {width}");
            }
            let mut halves = exec.tensor("halves", &[5], DType::Bf16).unwrap();
            let values = [1.0, 2.0, 3.0].map(bf16::from_f32);
            exec.fill_rows(&mut halves, &values).unwrap();
            let mut read = [bf16::ZERO; 3];
            exec.read(&halves, 0, &mut read).unwrap();
            assert_eq!(read, values, "not whole words");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn steps_in_flight_keep_their_inputs_and_their_results() {
        for mut exec in both() {
            let shapes: [(&str, &[usize]); 2] = [("a", &[70_000]), ("b", &[5_000, 8])];
            let [mut a, mut b] = exec.adjacent(shapes, DType::U32).unwrap();
            let mut landed = [0, 1].map(|_| Readback::new(&mut exec, 500_000).unwrap());
            let step = |i: usize| (words(1 + i * 9973 % 70_000, i as u64), words(8 * (1 + i * 37 % 5_000), !i as u64));
            for i in 0..60 {
                let (first, second) = step(i);
                exec.fill_adjacent([&mut a, &mut b], [&first, &second]).unwrap();
                landed[i % 2].start(&mut exec, &[&a, &b]).unwrap();
                if let Some(before) = i.checked_sub(1) {
                    let arrived = landed[before % 2].wait().unwrap();
                    let (first, second) = step(before);
                    assert!(arrived.tensor::<u32>(0) == first && arrived.tensor::<u32>(1) == second, "step {before}");
                }
            }
        }
    }
}
