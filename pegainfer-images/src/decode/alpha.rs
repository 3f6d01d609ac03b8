//! Conversion of grey and transparent pixels to RGB over white.

/// Pixels of 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha) bytes as RGB over white.
pub(super) fn over_white(pixels: &[u8], channels: usize) -> Vec<u8> {
    let mut rgb = vec![0; pixels.len() / channels * 3];
    write_over_white(pixels, channels, &mut rgb);
    rgb
}

/// As [`over_white`], into 3 bytes for each pixel.
pub(super) fn write_over_white(pixels: &[u8], channels: usize, rgb: &mut [u8]) {
    let (rgb, _) = rgb.as_chunks_mut::<3>();
    match channels {
        1 => pixels.iter().zip(rgb).for_each(|(grey, out)| *out = [*grey; 3]),
        2 => {
            let (pixels, _) = pixels.as_chunks::<2>();
            pixels.iter().zip(rgb).for_each(|([grey, a], out)| *out = [blend(*grey, *a); 3]);
        }
        3 => rgb.as_flattened_mut().copy_from_slice(pixels),
        _ => {
            let (pixels, _) = pixels.as_chunks::<4>();
            pixels.iter().zip(rgb).for_each(|([r, g, b, a], out)| *out = [*r, *g, *b].map(|c| blend(c, *a)));
        }
    }
}

/// `(c a + 255 (255 - a)) / 255`, rounded to nearest, as Pillow's `alpha_composite` over opaque white.
fn blend(c: u8, a: u8) -> u8 {
    let (c, a) = (u32::from(c), u32::from(a));
    // At most 255 * 255: the quotient fits.
    ((c * a + 255 * (255 - a) + 127) / 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alpha_is_blended_over_white_and_rounded() {
        for c in 0..=255u8 {
            assert_eq!((blend(c, 255), blend(c, 0), blend(255, c)), (c, 255, 255));
            for a in 0..=255u8 {
                let exact = (f64::from(c) * f64::from(a) + 255.0 * (255.0 - f64::from(a))) / 255.0;
                assert!((f64::from(blend(c, a)) - exact).abs() < 0.5, "{c} {a}");
            }
        }
    }

    #[test]
    fn each_layout_becomes_rgb() {
        assert_eq!(over_white(&[7, 8], 1), [7, 7, 7, 8, 8, 8]);
        assert_eq!(over_white(&[7, 255, 7, 0], 2), [7, 7, 7, 255, 255, 255]);
        assert_eq!(over_white(&[1, 2, 3], 3), [1, 2, 3]);
        assert_eq!(over_white(&[1, 2, 3, 255, 0, 0, 0, 128], 4), [1, 2, 3, 127, 127, 127]);
    }
}
