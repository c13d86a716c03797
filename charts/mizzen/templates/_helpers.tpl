{{/* Prefix of all object names. */}}
{{- define "mizzen.fullname" -}}
{{- $release := .Release.Name -}}
{{- with .Values.nameOverride }}{{ $release = printf "%s-%s" $release . }}{{ end -}}
{{- .Values.fullnameOverride | default $release | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "mizzen.operator" -}}
{{ include "mizzen.fullname" . }}-operator
{{- end }}

{{/* Labels that select the operator's pods. They never change between versions, because a Deployment's selector is immutable. */}}
{{- define "mizzen.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "mizzen" | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Image reference: with the digest if it is set, or else with the tag, or else with the chart's appVersion. A repository
without a registry would mean a namespace of Docker Hub that is not Mizzen's, so images.registry is required for it. */}}
{{- define "mizzen.image" -}}
{{- $image := index .root.Values.images .program -}}
{{- $name := $image.repository -}}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" $name) -}}
{{- $advice := printf "set images.registry to the registry and organisation that have the image %s, for example --set images.registry=registry.example.com/team, or begin images.%s.repository with a registry" $name .program -}}
{{- $name = printf "%s/%s" (required $advice .root.Values.images.registry) $name -}}
{{- end -}}
{{- if $image.digest }}{{ $name }}@{{ $image.digest }}
{{- else }}{{ $name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Namespace whose InferenceServices the operator serves; empty for all namespaces. */}}
{{- define "mizzen.namespace" -}}
{{- if eq .Values.rbac.scope "namespace" -}}
{{ .Values.operator.watchNamespace | default .Release.Namespace }}
{{- else -}}
{{ .Values.operator.watchNamespace }}
{{- end }}
{{- end }}

{{/* Values for the templates in files/, as JSON; mizzen_operator/chart.py builds the same values without Helm. */}}
{{- define "mizzen.scope" -}}
{{- $operator := include "mizzen.operator" . -}}
{{- $account := .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary $operator "default") -}}
{{- $images := dict -}}
{{- range list "operator" "engine" "gateway" }}
{{- $_ := set $images . (include "mizzen.image" (dict "root" $ "program" .)) }}
{{- end -}}
{{- dict
  "Names" (dict
    "app" (.Values.nameOverride | default "mizzen")
    "operator" $operator
    "serviceAccount" $account
    "gatewayRole" (printf "%s-gateway" (include "mizzen.fullname" .)))
  "Images" $images
  "Scope" (dict
    "acceleratorProfiles" (.Values.acceleratorProfiles | toJson)
    "namespace" (include "mizzen.namespace" .)
    "roleKind" (eq .Values.rbac.scope "namespace" | ternary "Role" "ClusterRole"))
  "Release" (dict "Name" .Release.Name "Namespace" .Release.Namespace)
  | toJson }}
{{- end }}

{{/* Common labels of an object; takes root, component and, optionally, more. */}}
{{- define "mizzen.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" (.root.Values.nameOverride | default "mizzen")
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge $own .root.Values.commonLabels (.more | default dict) | toYaml }}
{{- end }}

{{/* Metadata of an object; takes root, component, name and, optionally, annotations, more labels and namespace. */}}
{{- define "mizzen.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "mizzen.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Non-empty if monitors, rules and dashboards should be installed. */}}
{{- define "mizzen.monitoring" -}}
{{- $wanted := .Values.monitoring.enabled -}}
{{- if kindIs "bool" $wanted -}}
{{- $wanted | ternary "yes" "" -}}
{{- else if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
yes
{{- end }}
{{- end }}

{{/* Labels of the `helm test` pod. */}}
{{- define "mizzen.test.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "mizzen" | quote }}
app.kubernetes.io/component: test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
