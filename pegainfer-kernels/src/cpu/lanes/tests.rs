use super::*;

/// Stores the result of a function of one vector.
struct Store<F>(F, [f32; 16]);

/// A function under test.
trait Unary {
    fn apply<S: Lanes>(s: S, x: S::V) -> S::V;
}

struct Exp2;
impl Unary for Exp2 {
    #[inline(always)]
    fn apply<S: Lanes>(s: S, x: S::V) -> S::V {
        exp2(s, x)
    }
}

struct Round;
impl Unary for Round {
    #[inline(always)]
    fn apply<S: Lanes>(s: S, x: S::V) -> S::V {
        s.round(x)
    }
}

/// Through `narrow` and `widen`.
struct Narrow;
impl Unary for Narrow {
    #[inline(always)]
    fn apply<S: Lanes>(s: S, x: S::V) -> S::V {
        let mut half = [bf16::ZERO; 16];
        s.narrow(x, &mut half);
        s.widen(&half)
    }
}

/// The sum of the lanes, in all lanes.
struct Sum;
impl Unary for Sum {
    #[inline(always)]
    fn apply<S: Lanes>(s: S, x: S::V) -> S::V {
        s.splat(s.sum(x))
    }
}

impl<F: Unary> Kernel for Store<F> {
    type Out = [f32; 16];

    #[inline(always)]
    fn run<S: Lanes>(mut self, s: S) -> [f32; 16] {
        s.store(F::apply(s, s.load(&self.1)), &mut self.1);
        self.1
    }
}

#[test]
fn exp2_is_accurate_exact_at_zero_and_silent_where_masked() {
    for isa in Isa::available() {
        let mut worst = 0.0f64;
        for i in 0..125_000u32 {
            let x = std::array::from_fn(|lane| -((16 * i + lane as u32) as f32) * 6.2e-5);
            for (x, y) in x.into_iter().zip(dispatch(isa, Store(Exp2, x))) {
                let exact = f64::from(x).exp2();
                worst = worst.max((f64::from(y) - exact).abs() / exact);
            }
        }
        assert!(worst < 1.5e-7, "{isa} {worst:e}");
        let mut x = [f32::NEG_INFINITY; 16];
        (x[0], x[1], x[2], x[3], x[4]) = (0.0, -0.0, f32::NAN, -1.0, -125.1);
        let mut y = dispatch(isa, Store(Exp2, x));
        assert!(y[2].is_nan());
        y[2] = 0.0;
        assert_eq!(y, [1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn rounding_is_to_nearest_even_and_keeps_nan() {
    let lows = [0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];
    for isa in Isa::available() {
        for high in (0..=u16::MAX).step_by(2) {
            let x = std::array::from_fn(|i| f32::from_bits(u32::from(high + i as u16 / 8) << 16 | lows[i % 8]));
            for y in [dispatch(isa, Store(Round, x)), dispatch(isa, Store(Narrow, x))] {
                for (x, y) in x.into_iter().zip(y) {
                    assert_eq!(y.to_bits(), bf16::from_f32(x).to_f32().to_bits(), "{isa} {:#x}", x.to_bits());
                }
            }
        }
    }
}

#[test]
fn every_e4m3_code_widens_to_its_value() {
    struct Widen([u8; 16]);
    impl Kernel for Widen {
        type Out = [f32; 16];
        #[inline(always)]
        fn run<S: Lanes>(self, s: S) -> [f32; 16] {
            let mut out = [0.0; 16];
            s.store(s.widen_e4m3(&self.0), &mut out);
            out
        }
    }
    for isa in Isa::available() {
        for first in (0..=255u8).step_by(16) {
            let codes = std::array::from_fn(|i| first + i as u8);
            for (code, x) in codes.into_iter().zip(dispatch(isa, Widen(codes))) {
                assert_eq!(x.to_bits(), crate::cpu::formats::decode_e4m3(code).to_bits(), "{isa} {code:#x}");
            }
        }
    }
}

#[test]
fn the_order_of_a_sum_is_the_same_on_every_path() {
    let x = std::array::from_fn(|i| (i as f32 * 1.7).sin() * 10f32.powi(i as i32 % 5));
    for isa in Isa::available() {
        assert_eq!(dispatch(isa, Store(Sum, x)), dispatch(Isa::Portable, Store(Sum, x)));
    }
}

#[test]
fn a_zip_of_any_length_touches_its_own_elements() {
    #[derive(Clone, Copy)]
    struct Sub;
    impl Binary for Sub {
        #[inline(always)]
        fn apply<S: Lanes>(self, s: S, a: S::V, b: S::V) -> S::V {
            s.sub(a, b)
        }
    }
    struct Zip<'a>(&'a [bf16], &'a [bf16], &'a mut [bf16]);
    impl Kernel for Zip<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Lanes>(self, s: S) {
            zip(s, Sub, self.0, self.1, self.2);
        }
    }
    let a: Vec<bf16> = (0..70u16).map(|i| bf16::from_f32(f32::from(i) * 1.25)).collect();
    let b: Vec<bf16> = a.iter().rev().copied().collect();
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| (0..70).map(move |n| (isa, n))) {
        let mut out = vec![bf16::NAN; n];
        dispatch(isa, Zip(&a[..n], &b[..n], &mut out));
        let expected: Vec<bf16> =
            a.iter().zip(&b).take(n).map(|(a, b)| bf16::from_f32(a.to_f32() - b.to_f32())).collect();
        assert_eq!(out, expected, "{isa} {n}");
    }
}
