//! Adds one f32 tensor to another.

use super::values::cpu;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out += x`, element by element. Both f32, of the same shape.
pub fn add(exec: &mut Exec, x: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("add");
    check.is(x, DType::F32, out.shape())?;
    check.is(out, DType::F32, out.shape())?;
    exec.record(|_| OpRecord::new("add", "elements", &[x, out], &[out], out.elements() as u64));
    if exec.device() == Device::Cuda {
        return gpu::add(exec, x, out);
    }
    if cpu(check, exec)?.is_some() {
        out.host_mut::<f32>().iter_mut().zip(x.host::<f32>()).for_each(|(out, x)| *out += x);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;

    #[test]
    fn adds_each_element_and_refuses_other_shapes() {
        Host::each(|mut host| {
            let (mut x, mut out) = (host.zeros("x", &[2, 3], DType::F32), host.zeros("out", &[2, 3], DType::F32));
            x.host_mut::<f32>().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            out.host_mut::<f32>().fill(0.5);
            add(&mut host.exec, &x, &mut out).unwrap();
            assert_eq!(out.host::<f32>(), [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]);
            let mut other = host.zeros("other", &[3, 2], DType::F32);
            assert!(add(&mut host.exec, &x, &mut other).is_err());
        });
    }
}
