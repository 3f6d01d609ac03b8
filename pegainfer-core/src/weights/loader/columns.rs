//! Loads some columns of a matrix that a checkpoint stores whole and a model multiplies in parts.

use super::{Loader, Queued, READ_CHUNK, Source};
use crate::exec::Device;
use crate::tensor::{DType, Tensor};
use crate::weights::error::WeightsError;
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

impl Loader<'_> {
    /// Loads `columns` of a matrix `[rows, cols]` as a separate matrix, `[rows, columns.len()]`, bf16.
    pub fn columns(
        &mut self,
        name: String,
        (rows, cols): (usize, usize),
        columns: Range<usize>,
    ) -> Result<Tensor, WeightsError> {
        let (title, shape) = (format!("{name}[{}]", columns.start), [rows, columns.len()]);
        self.used.insert(name.clone());
        let mut tensor = self.allocate(&title, &shape, DType::Bf16)?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        let Source::Checkpoint(checkpoint) = self.source else {
            self.fill(&title, &shape, &mut tensor)?;
            return Ok(tensor);
        };
        let stored = self.bf16(checkpoint, &name, &[rows, cols])?.columns(cols, columns);
        if let Some(target) = tensor.target() {
            self.queued.push(Queued { target, stored, codes: None });
            return Ok(tensor);
        }
        let out: &mut [u8] = bytemuck::cast_slice_mut(tensor.host_mut::<bf16>());
        let chunks = out.par_chunks_mut(READ_CHUNK).enumerate();
        self.exec.on_host(|| chunks.try_for_each(|(i, chunk)| stored.read(i * READ_CHUNK, chunk)))?;
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Exec;
    use crate::isa::Isa;
    use safetensors::tensor::TensorView;

    #[test]
    fn the_columns_of_a_matrix_are_those_of_each_row() {
        // Rows longer than a chunk that a thread reads, and not a divisor of it.
        let (rows, cols) = (3, READ_CHUNK / 2 + 77);
        let values: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_f32((i % 251) as f32)).collect();
        let dir = std::env::temp_dir().join(format!("pegainfer-columns-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let view = TensorView::new(safetensors::Dtype::BF16, vec![rows, cols], bytemuck::cast_slice(&values)).unwrap();
        safetensors::serialize_to_file([("m", view)], None, &dir.join("model.safetensors")).unwrap();
        let source = Source::open(&dir).unwrap();
        let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
        for columns in [0..cols - 5, 9..cols, 4..5] {
            let load = |loader: &mut Loader<'_>| {
                let tensor = loader.columns("m".to_owned(), (rows, cols), columns.clone())?;
                assert!(loader.unused().is_empty());
                Ok(tensor)
            };
            let tensor = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap();
            let expected: Vec<bf16> = values.chunks(cols).flat_map(|row| &row[columns.clone()]).copied().collect();
            assert_eq!((tensor.shape(), tensor.host::<bf16>()), (&[rows, columns.len()][..], &expected[..]));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
