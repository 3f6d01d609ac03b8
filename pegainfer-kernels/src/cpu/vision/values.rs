//! Activations in bf16 or f32, sixteen at a time.

use crate::cpu::lanes::{Lanes, padded};
use half::bf16;

/// An element type of activations. Arithmetic is f32; a store rounds once, to nearest even.
pub trait Value: Copy + Default + Send + Sync + 'static {
    /// The value in f32, exactly.
    fn widen(self) -> f32;
    /// The value nearest to `x`.
    fn narrow(x: f32) -> Self;
}

impl Value for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Value for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

/// Up to sixteen values as lanes; lanes after the last value are 0.
#[inline(always)]
pub(super) fn load<S: Lanes, T: Value>(s: S, from: &[T]) -> S::V {
    let mut lanes = [0.0; 16];
    lanes.iter_mut().zip(from).for_each(|(lane, value)| *lane = value.widen());
    s.load(&lanes)
}

/// Up to sixteen f32 values as lanes; lanes after the last value are 0.
#[inline(always)]
pub(super) fn load_f32<S: Lanes>(s: S, from: &[f32]) -> S::V {
    match from.first_chunk() {
        Some(lanes) => s.load(lanes),
        None => s.load(&padded(from)),
    }
}

/// Stores the first lanes, as many as `to` has elements.
#[inline(always)]
pub(super) fn store<S: Lanes, T: Value>(s: S, v: S::V, to: &mut [T]) {
    let mut lanes = [0.0; 16];
    s.store(v, &mut lanes);
    to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = T::narrow(lane));
}
