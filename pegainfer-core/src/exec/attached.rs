//! What other crates keep with an [`Exec`].

use super::Exec;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;

/// One value of each type, dropped before the device is.
#[derive(Default)]
pub(super) struct Attached(HashMap<TypeId, Box<dyn Any + Send>>);

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attached({})", self.0.len())
    }
}

impl Exec {
    /// The value of type `T` that was attached, made by `make` if none was: what a library or a table of kernels keeps for
    /// as long as the device is open.
    pub fn attached<T: Any + Send>(&mut self, make: impl FnOnce(&mut Self) -> T) -> &mut T {
        if !self.attached.0.contains_key(&TypeId::of::<T>()) {
            let value = make(self);
            self.attach(value);
        }
        let value = self.attached.0.get_mut(&TypeId::of::<T>()).and_then(|value| value.downcast_mut());
        value.expect("a value of each type is kept under the type's id")
    }

    /// Attaches a value in place of one of its type.
    pub fn attach<T: Any + Send>(&mut self, value: T) {
        self.attached.0.insert(TypeId::of::<T>(), Box::new(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_and_can_be_replaced() {
        let mut exec = Exec::meta().unwrap();
        assert_eq!(exec.attached(|_| 1u32), &1);
        *exec.attached(|_| 2u32) += 4;
        assert_eq!((*exec.attached(|_| 0u32), *exec.attached(|_| 7u64)), (5, 7));
        exec.attach(9u32);
        assert_eq!(exec.attached(|_| 0u32), &9);
    }
}
