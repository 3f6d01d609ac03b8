//! Values that other crates keep in an `Exec`.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;

/// One value of each type, dropped before the device.
#[derive(Default)]
pub(super) struct Attached(HashMap<TypeId, Box<dyn Any + Send>>);

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attached({})", self.0.len())
    }
}

impl Attached {
    /// The value of type `T`, if one was set.
    pub fn get<T: Any + Send>(&mut self) -> Option<&mut T> {
        self.0.get_mut(&TypeId::of::<T>()).and_then(|value| value.downcast_mut())
    }

    /// Sets a value in place of one of its type.
    pub fn set<T: Any + Send>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Box::new(value));
    }
}

#[cfg(test)]
mod tests {
    use crate::exec::Exec;

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
