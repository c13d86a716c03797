// Grafana's types as JSON writes them: values of enumerations are plain strings there.
import type { Dashboard, DataQuery, FieldConfigSource, RowPanel, VariableModel } from '@grafana/schema';
import type { Panel } from '@grafana/schema/dist/types/veneer/dashboard.types';
import type * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as heatmap from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

type Plain<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer U>
      ? Array<Plain<U>>
      : T extends object
        ? { [K in keyof T]: Plain<T[K]> }
        : T;

// Of Prometheus' queries Grafana's package has the common part alone.
interface Query extends DataQuery {
  expr: string;
  legendFormat?: string;
  format?: 'table' | 'heatmap' | 'time_series';
  instant?: boolean;
  range?: boolean;
}

// Grafana's package has annotations without the fields of their data source, which are Prometheus' ones here.
type Annotation = NonNullable<NonNullable<Dashboard['annotations']>['list']>[number];
interface PrometheusAnnotation {
  expr: string;
  step: string;
  titleFormat: string;
  textFormat: string;
}

type Of<Kind extends string, Options, Custom = object> = Omit<
  Plain<Panel>,
  'type' | 'options' | 'fieldConfig' | 'targets'
> & {
  type: Kind;
  title: string;
  description: string;
  options?: Partial<Plain<Options>>; // the defaults if absent, as in Panel
  fieldConfig: Plain<Omit<FieldConfigSource, 'defaults'>> & {
    defaults: Plain<Omit<FieldConfigSource['defaults'], 'custom' | 'thresholds' | 'unit'>> & {
      unit: string;
      thresholds?: { mode: 'absolute' | 'percentage'; steps: Array<{ color: string; value: number | null }> };
      custom?: Partial<Plain<Custom>>;
    };
  };
  targets: Query[];
};

type AnyPanel =
  | (Plain<Omit<RowPanel, 'panels'>> & { type: 'row'; panels: [] })
  | Of<'timeseries', timeseries.Options, timeseries.FieldConfig>
  | Of<'stat', stat.Options>
  | Of<'heatmap', heatmap.Options, heatmap.FieldConfig>
  | Of<'bargauge', bargauge.Options>
  | Of<'table', table.Options, table.FieldConfig>;

export type Board = Omit<Plain<Dashboard>, 'annotations' | 'panels' | 'templating'> & {
  annotations: { list: Array<Plain<Annotation> & PrometheusAnnotation> };
  panels: AnyPanel[];
  templating: { list: Array<Omit<Plain<VariableModel>, 'current'> & { current: object; definition?: string }> };
};
