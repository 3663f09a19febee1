//! Families of series, written one after the other.

use super::Times;
use super::families::Family;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use std::fmt;

/// Value of a series.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value {
    Count(u64),
    Real(f64),
}

impl From<u64> for Value {
    fn from(count: u64) -> Value {
        Value::Count(count)
    }
}

impl From<usize> for Value {
    fn from(count: usize) -> Value {
        Value::Count(count as u64)
    }
}

impl From<bool> for Value {
    fn from(is_so: bool) -> Value {
        Value::Count(u64::from(is_so))
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Real(value)
    }
}

/// Seconds of so many microseconds.
pub fn of_us(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Seconds of so many milliseconds.
pub fn of_ms(ms: u64) -> f64 {
    ms as f64 / 1e3
}

/// The page while it is written.
pub struct Sheet<'a>(DescriptorEncoder<'a>);

impl<'a> Sheet<'a> {
    pub fn new(encoder: DescriptorEncoder<'a>) -> Sheet<'a> {
        Sheet(encoder)
    }

    /// All series of a family: values of its labels, in their order, and what the series says.
    pub fn series<'s, const N: usize, V: Into<Value>>(
        &mut self,
        family: &Family,
        series: impl IntoIterator<Item = ([&'s str; N], V)>,
    ) -> fmt::Result {
        assert_eq!(N, family.labels.len(), "labels of {}", family.name);
        let mut encoder = self.0.encode_descriptor(family.name, family.help, family.unit.as_ref(), family.kind)?;
        for (values, value) in series {
            let labels: Vec<(&str, &str)> = family.labels.iter().copied().zip(values).collect();
            match (family.kind, N) {
                (MetricType::Info, _) => encoder.encode_info(&labels)?,
                (_, 0) => write(&mut encoder, family.kind, value.into())?,
                _ => write(&mut encoder.encode_family(&labels)?, family.kind, value.into())?,
            }
        }
        Ok(())
    }

    /// The same, of series that are histograms.
    pub fn histograms<'s, const N: usize>(
        &mut self,
        family: &Family,
        series: impl IntoIterator<Item = ([&'s str; N], &'s Times)>,
    ) -> fmt::Result {
        assert_eq!(N, family.labels.len(), "labels of {}", family.name);
        let mut encoder = self.0.encode_descriptor(family.name, family.help, family.unit.as_ref(), family.kind)?;
        for (values, times) in series {
            let labels: Vec<(&str, &str)> = family.labels.iter().copied().zip(values).collect();
            let bucket = |(bound_us, count): &(Option<u64>, u64)| (bound_us.map_or(f64::INFINITY, of_us), *count);
            let buckets: Vec<(f64, u64)> = times.buckets.iter().map(bucket).collect();
            let count = buckets.iter().map(|(_, count)| count).sum();
            let mut encoder = encoder.encode_family(&labels)?;
            encoder.encode_histogram::<NoLabelSet>(of_us(times.sum_us), count, &buckets, None)?;
        }
        Ok(())
    }

    /// A family without labels, which has a series where there is something to say.
    pub fn one<V: Into<Value>>(&mut self, family: &Family, value: Option<V>) -> fmt::Result {
        self.series(family, value.map(|value| ([], value)))
    }
}

fn write(encoder: &mut MetricEncoder<'_>, kind: MetricType, value: Value) -> fmt::Result {
    match (kind, value) {
        (MetricType::Counter, Value::Count(count)) => encoder.encode_counter::<NoLabelSet, _, u64>(&count, None),
        (MetricType::Counter, Value::Real(value)) => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
        (_, Value::Count(count)) => encoder.encode_gauge(&count),
        (_, Value::Real(value)) => encoder.encode_gauge(&value),
    }
}
