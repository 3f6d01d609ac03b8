//! Parts of stored tensors: rows and columns that one rank, or one of several GEMMs, takes.

use std::ops::Range;

/// A tensor of the checkpoint, some rows of which become rows of a loaded tensor.
#[derive(Debug, Clone)]
pub struct SourceTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Number of its rows.
    pub rows: usize,
    /// The rows that are loaded.
    pub part: Range<usize>,
}

/// Columns of stored matrices that are loaded.
#[derive(Debug, Clone)]
pub struct Columns {
    /// Number of columns in the checkpoint.
    pub stored: usize,
    /// The columns that are loaded.
    pub part: Range<usize>,
}

impl From<usize> for Columns {
    /// All of `stored` columns.
    fn from(stored: usize) -> Self {
        Self { stored, part: 0..stored }
    }
}

impl SourceTensor {
    /// Rows of zeros, which no tensor of the checkpoint has.
    pub fn zeros(rows: usize) -> Self {
        Self { name: "zeros".to_owned(), rows: 0, part: 0..rows }
    }

    /// True for rows of zeros.
    pub fn is_zeros(&self) -> bool {
        self.rows == 0
    }

    /// All rows of a tensor.
    pub fn whole(name: String, rows: usize) -> Self {
        Self { name, rows, part: 0..rows }
    }

    /// Shape of the stored tensor; `None` for the columns of a vector.
    pub(super) fn stored_shape(&self, columns: Option<&Columns>) -> Vec<usize> {
        std::iter::once(self.rows).chain(columns.map(|columns| columns.stored)).collect()
    }

    /// Name of the loaded part, which seeds dummy weights.
    pub(super) fn title(&self, columns: Option<&Columns>) -> String {
        let (row, column) = (self.part.start, columns.map_or(0, |columns| columns.part.start));
        if (row, column) == (0, 0) { self.name.clone() } else { format!("{}[{row}, {column}]", self.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Exec;
    use crate::isa::Isa;
    use crate::weights::loader::READ_CHUNK;
    use crate::weights::{Loader, Source};
    use half::bf16;
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
                let part = Columns { stored: cols, part: columns.clone() };
                let tensor = loader.stacked("m", &[SourceTensor::whole("m".to_owned(), rows)], part)?;
                assert!(loader.unused().is_empty());
                Ok(tensor)
            };
            let tensor = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap();
            let expected: Vec<bf16> = values.chunks(cols).flat_map(|row| &row[columns.clone()]).copied().collect();
            assert_eq!((tensor.shape(), tensor.host::<bf16>()), (&[rows, columns.len()][..], &expected[..]));
        }
        let (rows, columns) = (1..3, 7..cols - 4);
        let part = SourceTensor { name: "m".to_owned(), rows: 3, part: rows.clone() };
        let expected: Vec<bf16> = values.chunks(cols).skip(1).flat_map(|row| &row[columns.clone()]).copied().collect();
        let columns = Columns { stored: cols, part: columns };
        let load = |loader: &mut Loader<'_>| loader.stacked("m", &[part], columns);
        let tensor = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap();
        assert_eq!((tensor.shape()[0], tensor.host::<bf16>()), (rows.len(), &expected[..]));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
