//! The running sequences, in order of age.

use crate::schedule::sequence::Sequence;
use std::ops::{Deref, Index, IndexMut};

/// Running sequences, oldest first. A sequence has a position, which changes when older ones end, and a fixed index,
/// which the rows of a step use.
#[derive(Debug)]
pub(super) struct Running<L> {
    /// Boxed, so that only pointers move when a sequence ends.
    sequences: Vec<Box<Sequence<L>>>,
    /// Position of each sequence, by index.
    places: Vec<usize>,
    /// Unused indices.
    free: Vec<usize>,
}

impl<L> Running<L> {
    pub fn new() -> Self {
        Self { sequences: Vec::new(), places: Vec::new(), free: Vec::new() }
    }

    /// Adds the youngest.
    pub fn push(&mut self, mut sequence: Box<Sequence<L>>) {
        sequence.index = self.free.pop().unwrap_or_else(|| {
            self.places.push(0);
            self.places.len() - 1
        });
        self.places[sequence.index] = self.sequences.len();
        self.sequences.push(sequence);
    }

    /// Takes out the one at this place.
    pub fn remove(&mut self, place: usize) -> Box<Sequence<L>> {
        let sequence = self.sequences.remove(place);
        self.free.push(sequence.index);
        for (place, sequence) in self.sequences.iter().enumerate().skip(place) {
            self.places[sequence.index] = place;
        }
        sequence
    }

    /// The sequence with this index.
    pub fn at_index(&mut self, index: usize) -> Option<&mut Sequence<L>> {
        let place = *self.places.get(index)?;
        self.sequences.get_mut(place).map(Box::as_mut).filter(|sequence| sequence.index == index)
    }

    /// Drops the sequences for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&Sequence<L>) -> bool) {
        let Some(first) = self.sequences.iter().position(|sequence| !keep(sequence)) else { return };
        self.free.extend(self.sequences.iter().filter(|sequence| !keep(sequence)).map(|sequence| sequence.index));
        self.sequences.retain(|sequence| keep(sequence));
        for (place, sequence) in self.sequences.iter().enumerate().skip(first) {
            self.places[sequence.index] = place;
        }
    }

    /// Removes all sequences.
    pub fn take(&mut self) -> Vec<Box<Sequence<L>>> {
        self.free.extend(self.sequences.iter().map(|sequence| sequence.index));
        std::mem::take(&mut self.sequences)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Sequence<L>> + ExactSizeIterator {
        self.sequences.iter().map(Box::as_ref)
    }

    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Box<Sequence<L>>> {
        self.sequences.iter_mut()
    }
}

impl<L> Deref for Running<L> {
    type Target = [Box<Sequence<L>>];

    fn deref(&self) -> &[Box<Sequence<L>>] {
        &self.sequences
    }
}

impl<L> IndexMut<usize> for Running<L> {
    fn index_mut(&mut self, place: usize) -> &mut Sequence<L> {
        &mut self.sequences[place]
    }
}

impl<L> Index<usize> for Running<L> {
    type Output = Sequence<L>;

    fn index(&self, place: usize) -> &Sequence<L> {
        &self.sequences[place]
    }
}
