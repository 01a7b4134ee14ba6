//! Any bytes as a file of requests: each line is a request or one sentence about what is wrong.
#![no_main]

use lane::batch::{Line, RequestLine, read_line};
use libfuzzer_sys::fuzz_target;

/// Short, so that lines that are too long are met often.
const MAX_LINE_BYTES: usize = 512;

fuzz_target!(|file: &[u8]| {
    let mut rest = file;
    let mut lines = 0;
    while let Some(line) = read_line(&mut rest, MAX_LINE_BYTES).expect("memory can be read") {
        lines += 1;
        let Line::Text(text) = line else { continue };
        assert!(text.len() <= MAX_LINE_BYTES && !text.contains('\n'));
        match RequestLine::parse(&text) {
            Ok(request) => {
                request.sampling.check().expect("checked on reading");
                assert!(request.stop.iter().all(|text| !text.is_empty()));
            }
            Err(bad) => assert!(!bad.reason.is_empty() && !bad.reason.contains('\n'), "{bad:?}"),
        }
    }
    let ends = file.iter().filter(|&&byte| byte == b'\n').count();
    assert!(lines == ends || lines == ends + 1, "{lines} lines, {ends} line ends");
});
