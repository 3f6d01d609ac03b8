#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pegainfer_fuzz::image_parts::check(data));
