//! Bicubic resizing with antialiasing, equal in every byte to torchvision's on uint8.

use crate::decode::Rgb8;
use fast_image_resize::images::Image;
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

/// Scales an image to `width` x `height` pixels: bicubic (a = -0.5), with antialiasing, in 8 bits.
///
/// torchvision makes two passes, over the width and then over the height, and rounds and clips to 8 bits between them. One
/// call of fast_image_resize makes them in the other order, which differs by up to 19 levels at edges. Two calls, one for
/// each axis, give the same bytes. The memory beyond the image is `3 width (image.height + height)` bytes.
pub fn resize(image: Rgb8, width: u32, height: u32) -> Rgb8 {
    resize_with(&mut Resizer::new(), image, width, height)
}

fn resize_with(resizer: &mut Resizer, image: Rgb8, width: u32, height: u32) -> Rgb8 {
    let Rgb8 { pixels, width: stored_width, height: stored_height } = image;
    let stored =
        Image::from_vec_u8(stored_width, stored_height, pixels, PixelType::U8x3).expect("3 bytes for each pixel");
    let wide = pass(resizer, stored, width, stored_height);
    let pixels = pass(resizer, wide, width, height).into_vec();
    Rgb8 { pixels, width, height }
}

/// Scales one axis; an image of that size stays as it is.
fn pass(resizer: &mut Resizer, image: Image<'static>, width: u32, height: u32) -> Image<'static> {
    if (image.width(), image.height()) == (width, height) {
        return image;
    }
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::CatmullRom)).use_alpha(false);
    let mut scaled = Image::new(width, height, PixelType::U8x3);
    resizer.resize(&image, &mut scaled, &options).expect("both images have 3 bytes for each pixel");
    scaled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageLimits, decode};
    use fast_image_resize::CpuExtensions;

    fn fixture(name: &str) -> Rgb8 {
        let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
        decode(&std::fs::read(path).unwrap(), &ImageLimits::default()).unwrap()
    }

    /// The instruction sets of this machine, and none.
    fn resizers() -> Vec<Resizer> {
        #[cfg(target_arch = "x86_64")]
        let all = [CpuExtensions::None, CpuExtensions::Sse4_1, CpuExtensions::Avx2];
        #[cfg(target_arch = "aarch64")]
        let all = [CpuExtensions::None, CpuExtensions::Neon];
        all.into_iter()
            .filter(CpuExtensions::is_supported)
            .map(|extensions| {
                let mut resizer = Resizer::new();
                // SAFETY: this machine supports the extensions.
                unsafe { resizer.set_cpu_extensions(extensions) };
                resizer
            })
            .collect()
    }

    #[test]
    fn resized_images_equal_torchvisions_with_every_instruction_set() {
        for mut resizer in resizers() {
            for (image, resized) in [
                ("sources/small.png", "resized/small.png"),
                ("sources/wide.png", "resized/wide.png"),
                ("sources/alpha.png", "resized/alpha.png"),
                ("sources/tall_gray.png", "resized/tall_gray.png"),
            ] {
                let expected = fixture(resized);
                let found = resize_with(&mut resizer, fixture(image), expected.width, expected.height);
                assert!(found.pixels == expected.pixels, "{image} with {:?}", resizer.cpu_extensions());
            }
        }
    }

    #[test]
    fn an_image_of_the_right_size_stays_as_it_is() {
        let pixels: Vec<u8> = (0..32 * 64 * 3).map(|i| (i * 37 % 251) as u8).collect();
        let image = Rgb8 { pixels, width: 64, height: 32 };
        assert!(resize(image.clone(), 64, 32) == image);
    }
}
