//! The matrices of an adapter as the projections of a rank take them.

use super::file::{AdapterFile, Factors};
use super::module::path;
use crate::projection_source::{LayerSources, ProjectionSource};
use half::bf16;
use pegainfer_core::weights::SourceTensor;

/// The matrices of a projection in one slot. Ranks below the slot's are padded with zeros.
#[derive(Debug)]
pub(super) struct SlotValues {
    /// `[segments * rank, k]`: the `A` of each module, one after the other.
    pub a: Vec<bf16>,
    /// `[n, rank]`: the rows of each module's `B` in the order of the projection's rows.
    pub b: Vec<bf16>,
}

/// Values of a layer's four projections; `None` for a projection that the adapter does not change.
pub(super) type LayerValues = [Option<SlotValues>; 4];

/// An adapter as the ranks take it.
#[derive(Debug)]
pub(super) struct AdapterValues {
    /// Layers of each rank.
    pub ranks: Vec<Vec<LayerValues>>,
}

/// Number of rows of each module of a projection, whose modules are stacked. Zeros that pad it come last and belong to
/// none.
pub(super) fn segments(source: &ProjectionSource) -> Vec<usize> {
    modules(source).map(rows).collect()
}

/// Rows of the projection.
pub(super) fn height(source: &ProjectionSource) -> usize {
    rows(&source.parts)
}

fn rows(parts: &[SourceTensor]) -> usize {
    parts.iter().map(|part| part.part.len()).sum()
}

/// The parts of each module.
fn modules(source: &ProjectionSource) -> impl Iterator<Item = &[SourceTensor]> {
    source.parts.chunk_by(|one, next| one.name == next.name).filter(|parts| !parts[0].is_zeros())
}

impl AdapterValues {
    /// Lays out an adapter for slots of this rank. `layers`: those of each rank.
    pub fn new(file: &AdapterFile, layers: &[Vec<LayerSources>], rank: usize) -> Self {
        let layer = |layer: &LayerSources| layer.all().map(|source| lay_out(file, source?, rank));
        Self { ranks: layers.iter().map(|layers| layers.iter().map(layer).collect()).collect() }
    }

    /// Bytes of all ranks.
    pub fn bytes(&self) -> usize {
        let values = self.ranks.iter().flatten().flatten().flatten();
        values.map(|values| (values.a.len() + values.b.len()) * size_of::<bf16>()).sum()
    }
}

/// The values of a projection.
fn lay_out(file: &AdapterFile, source: &ProjectionSource, rank: usize) -> Option<SlotValues> {
    let factors = |parts: &[SourceTensor]| file.modules.get(path(&parts[0].name));
    modules(source).find(|parts| factors(parts).is_some())?;
    let (columns, stored) = (&source.columns.part, source.columns.stored);
    let mut a = Vec::with_capacity(segments(source).len() * rank * columns.len());
    let mut b = Vec::with_capacity(height(source) * rank);
    for parts in modules(source) {
        let (end_of_a, end_of_b) = (a.len() + rank * columns.len(), b.len() + rows(parts) * rank);
        if let Some(Factors { rank: own, a: own_a, b: own_b }) = factors(parts) {
            own_a.chunks_exact(stored).for_each(|row| a.extend_from_slice(&row[columns.clone()]));
            for row in parts.iter().flat_map(|part| part.part.clone()) {
                let end = b.len() + rank;
                b.extend_from_slice(&own_b[row * own..][..*own]);
                b.resize(end, bf16::ZERO);
            }
        }
        a.resize(end_of_a, bf16::ZERO);
        b.resize(end_of_b, bf16::ZERO);
    }
    b.resize(height(source) * rank, bf16::ZERO);
    Some(SlotValues { a, b })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::weights::Columns;
    use std::collections::BTreeMap;

    /// A module with distinct values: `a` counts from 0 in steps of 1, `b` from 100.
    fn factors(rows: usize, columns: usize, rank: usize) -> Factors {
        let values = |first: usize, n: usize| (first..first + n).map(|v| bf16::from_f32(v as f32)).collect();
        Factors { rank, a: values(0, rank * columns), b: values(100, rows * rank) }
    }

    fn numbers(values: &[bf16]) -> Vec<f32> {
        values.iter().map(|value| value.to_f32()).collect()
    }

    /// A rank's rows and columns of three stacked modules, one of which the adapter does not change, and padding.
    #[test]
    fn rows_of_b_follow_the_projection_and_columns_of_a_its_input() {
        let part = |name: &str, rows: usize, part: std::ops::Range<usize>| SourceTensor {
            name: format!("{name}.weight"),
            rows,
            part,
        };
        let parts = vec![
            part("q", 4, 2..4),
            part("k", 2, 0..1),
            part("v", 6, 4..5),
            part("v", 6, 0..1),
            SourceTensor::zeros(3),
        ];
        let source = ProjectionSource { parts, columns: Columns { stored: 4, part: 1..3 } };
        assert_eq!((segments(&source), height(&source)), (vec![2, 1, 2], 8));
        let modules = BTreeMap::from([("q".to_owned(), factors(4, 4, 1)), ("v".to_owned(), factors(6, 4, 2))]);
        let file = AdapterFile { modules, skipped: None };
        let SlotValues { a, b } = lay_out(&file, &source, 2).unwrap();
        assert_eq!(numbers(&a), [1., 2., 0., 0., 0., 0., 0., 0., 1., 2., 5., 6.]);
        assert_eq!(numbers(&b), [102., 0., 103., 0., 0., 0., 108., 109., 100., 101., 0., 0., 0., 0., 0., 0.]);
        let none = AdapterFile { modules: BTreeMap::new(), skipped: None };
        assert!(lay_out(&none, &source, 2).is_none());
    }
}
